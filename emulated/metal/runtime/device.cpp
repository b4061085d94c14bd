// MTLDevice and the objects that only it creates: an Apple GPU of the first family that candle's kernels require, of
// unknown architecture. Two environment variables select another family and architecture.
#include <cstdlib>
#include <cstring>

#include "metal.h"

PUBLIC_CLASS(MTLCompileOptions)
PUBLIC_CLASS(MTLFunctionConstantValues)
PUBLIC_CLASS(MTLResidencySetDescriptor)

static Class device_class("MTLDevice");
static Class architecture_class("MTLArchitecture");
static Class function_class("MTLFunction");
static Class library_class("MTLLibrary");
static Class pipeline_class("MTLComputePipelineState");
static Class fence_class("MTLFence");
static Class residency_class("MTLResidencySet");

struct ConstantValues : Object {
    Constants values;
    ConstantValues() : Object(&_OBJC_CLASS_MTLFunctionConstantValues) {}
};

struct Library : Object {
    std::shared_ptr<const Functions> functions;
    explicit Library(std::shared_ptr<const Functions> functions)
        : Object(&library_class), functions(std::move(functions)) {}
};

struct Function : Object {
    std::shared_ptr<const Code> code;
    explicit Function(std::shared_ptr<const Code> code) : Object(&function_class), code(std::move(code)) {}
};

Pipeline::Pipeline(std::shared_ptr<const Code> code) : Object(&pipeline_class), code(std::move(code)) {}
Fence::Fence() : Object(&fence_class) {}

Object *the_device() {
    static Object *device = new Object(&device_class);
    return device;
}

extern "C" {
id MTLCreateSystemDefaultDevice() { return objc_retain(the_device()); }
id MTLCopyAllDevices() {
    Array *devices = new Array;
    devices->items.push_back(the_device());
    return devices;
}
}

// MTLGPUFamily: Apple1 is 1001, and each includes those before it.
static bool supports(long family) {
    const char *set = getenv("MOS_HEAD_METAL_FAMILY");
    long newest = set ? atol(set) : 1007;
    bool apple = 1001 <= family && family <= newest;
    bool common = 3001 <= family && family <= 3003;
    return apple || common || family == 2002 || family == 5001;
}

// The last letter of the name stands for the size of the GPU; candle selects its tiles by it.
static id architecture() {
    const char *name = getenv("MOS_HEAD_METAL_ARCHITECTURE");
    static Object *only = new Object(&architecture_class);
    return name ? only : nullptr;
}

// Metal creates no buffer of zero bytes.
static Buffer *buffer(size_t length, unsigned long options) {
    if (length) return new Buffer(length, options);
    fprintf(stderr, "emulated Metal: a buffer of no bytes\n");
    return nullptr;
}

static id function(Library *library, String *name, const Constants &constants, id *error) {
    std::string why;
    std::shared_ptr<const Code> code = library->functions->find(name->text, constants, why);
    if (code) return new Function(code);
    fprintf(stderr, "emulated Metal: %s\n", why.c_str());
    if (error) *error = new Error(why);
    return nullptr;
}

static uint64_t constant(const void *value, size_t type) {
    // MTLDataType
    size_t size = type == 53 ? 1 : type == 41 ? 2 : type == 3 || type == 29 || type == 33 ? 4 : type == 85 ? 8 : 0;
    if (!size) die("a function constant of data type " + std::to_string(type));
    uint64_t bits = 0;
    memcpy(&bits, value, size);
    return bits;
}

static int methods = [] {
    class_method(_OBJC_CLASS_MTLCompileOptions, "new",
                 [](id, SEL) -> id { return new Object(&_OBJC_CLASS_MTLCompileOptions); });
    for (const char *option : {"setMathMode:", "setMathFloatingPointFunctions:", "setLanguageVersion:"})
        method(_OBJC_CLASS_MTLCompileOptions, option, [](id, SEL, long) {});
    method(_OBJC_CLASS_MTLCompileOptions, "setFastMathEnabled:", [](id, SEL, bool) {});

    Class &constants = _OBJC_CLASS_MTLFunctionConstantValues;
    class_method(constants, "new", [](id, SEL) -> id { return new ConstantValues; });
    method(constants,
           "setConstantValue:type:atIndex:", [](ConstantValues *self, SEL, const void *value, size_t type, size_t i) {
               self->values[i] = constant(value, type);
           });

    Class &device = device_class;
    method(device, "registryID", [](id, SEL) -> uint64_t { return 1; });
    method(device, "name", [](id, SEL) -> id { return autoreleased(new String("emulated")); });
    method(device, "architecture", [](id, SEL) -> id { return architecture(); });
    method(architecture_class, "name",
           [](id, SEL) -> id { return autoreleased(new String(getenv("MOS_HEAD_METAL_ARCHITECTURE"))); });
    method(device, "supportsFamily:", [](id, SEL, long family) { return supports(family); });
    method(device, "recommendedMaxWorkingSetSize", [](id, SEL) -> uint64_t { return uint64_t(8) << 30; });
    method(device, "currentAllocatedSize", [](id, SEL) -> size_t { return 0; });
    method(device, "maxBufferLength", [](id, SEL) -> size_t { return size_t(4) << 30; });
    method(device, "maxThreadgroupMemoryLength", [](id, SEL) -> size_t { return 32 << 10; });
    method(device, "hasUnifiedMemory", [](id, SEL) { return true; });
    method(device, "newCommandQueue", [](id, SEL) -> id { return new_queue(); });
    method(device, "newFence", [](id, SEL) -> id { return new Fence; });
    method(device, "newBufferWithLength:options:", [](id, SEL, size_t length, unsigned long options) -> id {
        return buffer(length, options);
    });
    method(device, "newBufferWithBytes:length:options:",
           [](id, SEL, const void *bytes, size_t length, unsigned long options) -> id {
               Buffer *made = buffer(length, options);
               if (made) memcpy(made->bytes, bytes, length);
               return made;
           });
    method(device, "newLibraryWithSource:options:error:", [](id, SEL, String *source, id, id *error) -> id {
        try {
            bool ours = source->text.substr(0, source->text.find('\n')).find("mos-head") != std::string::npos;
            return new Library(ours ? shader(source->text) : candle());
        } catch (const std::string &why) {
            *error = new Error(why);
            return nullptr;
        }
    });
    method(device, "newComputePipelineStateWithFunction:error:", [](id, SEL, Function *function, id *) -> id {
        return new Pipeline(function->code);
    });

    method(library_class, "newFunctionWithName:", [](Library *self, SEL, String *name) -> id {
        return function(self, name, {}, nullptr);
    });
    method(library_class, "newFunctionWithName:constantValues:error:",
           [](Library *self, SEL, String *name, ConstantValues *values, id *error) -> id {
               return function(self, name, values->values, error);
           });
    method(pipeline_class, "maxTotalThreadsPerThreadgroup", [](id, SEL) -> size_t { return 1024; });
    method(pipeline_class, "threadExecutionWidth", [](id, SEL) -> size_t { return 32; });

    // Every buffer is resident.
    class_method(_OBJC_CLASS_MTLResidencySetDescriptor, "new",
                 [](id, SEL) -> id { return new Object(&_OBJC_CLASS_MTLResidencySetDescriptor); });
    method(device, "newResidencySetWithDescriptor:error:", [](id, SEL, id, id *) -> id {
        return new Object(&residency_class);
    });
    method(residency_class, "requestResidency", [](id, SEL) {});
    method(residency_class, "addAllocation:", [](id, SEL, id) {});
    method(residency_class, "removeAllocation:", [](id, SEL, id) {});
    method(residency_class, "commit", [](id, SEL) {});
    return 0;
}();

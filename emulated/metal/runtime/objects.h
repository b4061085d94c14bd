// Objects, classes and messages: the part of the Objective-C runtime that `objc2` needs.
#pragma once
#include <atomic>
#include <map>
#include <string>
#include <utility>

typedef const char *SEL;
typedef void (*Method)();
struct Class;

struct Object {
    Class *isa;
    std::atomic<long> references{1};
    explicit Object(Class *isa) : isa(isa) {}
    virtual ~Object() {}
};
typedef Object *id;

// A class is an object without a class of its own.
struct Class : Object {
    const char *name;
    std::map<std::string, Method> instance_methods, class_methods;
    explicit Class(const char *called) : Object(nullptr), name(called) {}
};

// A class that the Rust side refers to by this symbol.
#define PUBLIC_CLASS(n) \
    extern "C" {        \
    Class _OBJC_CLASS_##n(#n); \
    }

template <class F> void method(Class &c, const char *selector, F f) { c.instance_methods[selector] = Method(+f); }
template <class F> void class_method(Class &c, const char *selector, F f) { c.class_methods[selector] = Method(+f); }

extern "C" id objc_retain(id object);
extern "C" void objc_release(id object);

// The result of a method that returns a new object but does not have "new" or "copy" in its name.
id autoreleased(id object);

// Prints the error and ends the process.
[[noreturn]] void die(const std::string &what);

// A counted reference to an object.
template <class T> class Ref {
    T *object = nullptr;

  public:
    Ref() {}
    Ref(T *shared) : object(shared) { objc_retain(object); }
    Ref(const Ref &other) : Ref(other.object) {}
    Ref(Ref &&other) noexcept : object(std::exchange(other.object, nullptr)) {}
    Ref &operator=(Ref other) {
        std::swap(object, other.object);
        return *this;
    }
    ~Ref() { objc_release(object); }
    T *operator->() const { return object; }
    T *get() const { return object; }
    explicit operator bool() const { return object; }
};

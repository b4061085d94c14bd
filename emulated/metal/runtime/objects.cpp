// The Objective-C runtime: selectors, messages, reference counts.
#include "objects.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

void die(const std::string &what) {
    fprintf(stderr, "emulated Metal: %s\n", what.c_str());
    fflush(stderr);
    abort();
}

// A caller that retains an autoreleased object does so before any other call, and takes over its only reference, so no
// autorelease pool is needed.
static thread_local id last_autoreleased;

id autoreleased(id object) {
    last_autoreleased = object;
    return object;
}

// The class of every class.
static Class metaclass("a metaclass");

static bool same(id a, SEL, id b) { return a == b; }
static size_t hash(id object, SEL) { return size_t(object); }

static Method find(Class *c, SEL selector, bool is_class) {
    auto &methods = is_class ? c->class_methods : c->instance_methods;
    auto found = methods.find(selector);
    if (found != methods.end()) return found->second;
    if (std::string(selector) == "isEqual:") return Method(same);
    if (std::string(selector) == "hash") return Method(hash);
    die(std::string(is_class ? "+[" : "-[") + c->name + " " + selector + "] is not implemented");
}

extern "C" {
SEL sel_registerName(const char *name) {
    static std::set<std::string> names;
    static std::mutex one;
    std::lock_guard<std::mutex> lock(one);
    return names.insert(name).first->c_str();
}
const char *sel_getName(SEL selector) { return selector; }
bool sel_isEqual(SEL a, SEL b) { return a == b; }

Method objc_msg_lookup(id receiver, SEL selector) {
    bool is_class = !receiver->isa;
    return find(is_class ? static_cast<Class *>(receiver) : receiver->isa, selector, is_class);
}

id objc_retain(id object) {
    if (object && object->isa) object->references++;
    return object;
}
void objc_release(id object) {
    if (object && object->isa && --object->references == 0) delete object;
}
id objc_autorelease(id object) { return object; }
id objc_retainAutoreleasedReturnValue(id object) {
    if (object && object == last_autoreleased) {
        last_autoreleased = nullptr;
        return object;
    }
    return objc_retain(object);
}
void *objc_autoreleasePoolPush() { return nullptr; }
void objc_autoreleasePoolPop(void *) {}

Class *object_getClass(id object) { return object->isa ? object->isa : &metaclass; }
const char *class_getName(Class *c) { return c->name; }
bool class_isMetaClass(Class *c) { return c == &metaclass; }
Class *objc_getClass(const char *) { return nullptr; }
}

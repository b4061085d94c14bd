// Strings, arrays and errors: the part of Apple's Foundation that candle uses.
#include "foundation.h"

PUBLIC_CLASS(NSString)
PUBLIC_CLASS(NSArray)
PUBLIC_CLASS(NSError)

String::String(std::string text) : Object(&_OBJC_CLASS_NSString), text(std::move(text)) {}
Array::Array() : Object(&_OBJC_CLASS_NSArray) {}
Error::Error(const std::string &text) : Object(&_OBJC_CLASS_NSError) {
    String *string = new String(text);
    description = string;
    objc_release(string);
}

static int methods = [] {
    Class &string = _OBJC_CLASS_NSString;
    class_method(string, "alloc", [](id, SEL) -> id { return new String(""); });
    method(string,
           "initWithBytes:length:encoding:", [](String *self, SEL, const char *bytes, size_t length, size_t) -> id {
               self->text.assign(bytes, length);
               return self;
           });
    method(string, "UTF8String", [](String *self, SEL) { return self->text.c_str(); });
    method(string, "lengthOfBytesUsingEncoding:", [](String *self, SEL, size_t) { return self->text.size(); });
    method(string, "length", [](String *self, SEL) { return self->text.size(); });
    method(string, "description", [](String *self, SEL) -> id { return self; });
    method(string, "isKindOfClass:", [](id, SEL, id) { return true; });

    Class &array = _OBJC_CLASS_NSArray;
    class_method(array, "alloc", [](id, SEL) -> id { return new Array; });
    method(array, "initWithObjects:count:", [](Array *self, SEL, id *items, size_t count) -> id {
        self->items.assign(items, items + count);
        return self;
    });
    method(array, "count", [](Array *self, SEL) { return self->items.size(); });
    method(array, "objectAtIndex:", [](Array *self, SEL, size_t i) -> id { return self->items.at(i).get(); });
    method(array, "getObjects:", [](Array *self, SEL, id *to) {
        for (Ref<Object> &item : self->items) *to++ = item.get();
    });
    method(array, "getObjects:range:", [](Array *self, SEL, id *to, size_t from, size_t count) {
        for (size_t i = 0; i < count; i++) to[i] = self->items.at(from + i).get();
    });

    Class &error = _OBJC_CLASS_NSError;
    method(error, "localizedDescription", [](Error *self, SEL) -> id { return self->description.get(); });
    method(error, "description", [](Error *self, SEL) -> id { return self->description.get(); });
    return 0;
}();

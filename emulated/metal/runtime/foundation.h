// Strings, arrays and errors.
#pragma once
#include <vector>

#include "objects.h"

struct String : Object {
    std::string text;
    explicit String(std::string text);
};

struct Array : Object {
    std::vector<Ref<Object>> items;
    Array();
};

struct Error : Object {
    Ref<String> description;
    explicit Error(const std::string &text);
};

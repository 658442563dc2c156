// library_dir.h - where a piece of code lies on disk: plugins/ lies beside libstrata.so, wherever that was put.
#pragma once

#include <string>

namespace strata {

// The directory of the library or program that has this function or object in it, symbolic links resolved; "" when it
// cannot be found out.
std::string directory_of(const void* code);

// The same for the library or program that this function is linked into.
std::string this_library_dir();

}  // namespace strata

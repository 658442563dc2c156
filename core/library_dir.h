// library_dir.h - the directory of the library or program this code is linked into: plugins/ lies beside it.
// "" when it cannot be found out; then nothing is searched there.
#pragma once

#include <string>

namespace strata {

std::string this_library_dir();

}  // namespace strata

// in_memory.h - whether what a directory's file system holds lies in RAM, where there should be a disk.
#pragma once

#include <string>

namespace strata::io {

// tmpfs and ramfs. False also where the path cannot be asked: whoever opens a file there finds out why.
bool is_in_memory(const std::string& path);

}  // namespace strata::io

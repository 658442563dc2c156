// elf_preflight.h - says whether a file can be mapped as a library here, before the dynamic loader touches it.
//
// dlopen of a truncated library kills the process with SIGBUS, and for a library of another machine it says "no such
// file". This reads the headers only: ELF magic, class, byte order, machine, ET_DYN, and that every loadable segment
// lies inside the file.
#pragma once

#include <filesystem>

#include "core/status.h"

namespace strata {

// NOT_FOUND when there is no such file, FAILED_PRECONDITION with what is wrong otherwise.
Status elf_preflight(const std::filesystem::path& library);

}  // namespace strata

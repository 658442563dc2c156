#include "core/plugins/library_dir.h"

#include <dlfcn.h>

#include <filesystem>

namespace strata {

std::string directory_of(const void* code) {
  Dl_info info{};
  if (!dladdr(code, &info) || !info.dli_fname) return "";
  std::error_code error;
  const auto path = std::filesystem::canonical(info.dli_fname, error);
  return error ? "" : path.parent_path().string();
}

std::string this_library_dir() { return directory_of(reinterpret_cast<const void*>(&this_library_dir)); }

}  // namespace strata

// exports.cc - what a shared library shows to others, read from its file: the dynamic symbols it defines.
//
// For libraries that could be loaded before: sizes are checked against the file, odd files give fewer names.
#include <elf.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "strata/plugin.h"
#include "tools/commands.h"

namespace strata::cli {
namespace {

// The item at `offset`, or a zeroed one when the file ends before it.
template <class T>
T at(const std::string& file, uint64_t offset) {
  T item{};
  if (offset <= file.size() && file.size() - offset >= sizeof item)
    std::memcpy(&item, file.data() + offset, sizeof item);
  return item;
}

bool is_export(const Elf64_Sym& symbol) {
  const auto binding = ELF64_ST_BIND(symbol.st_info);
  return symbol.st_shndx != SHN_UNDEF && symbol.st_shndx != SHN_ABS && binding != STB_LOCAL;
}

}  // namespace

std::vector<std::string> extra_exports(const std::filesystem::path& library) {
  std::ifstream in(library, std::ios::binary);
  const std::string file{std::istreambuf_iterator<char>(in), {}};
  const auto header = at<Elf64_Ehdr>(file, 0);
  const auto section = [&](uint64_t i) { return at<Elf64_Shdr>(file, header.e_shoff + i * sizeof(Elf64_Shdr)); };
  std::vector<std::string> names;
  for (uint64_t i = 0; i < header.e_shnum; ++i) {
    const Elf64_Shdr symbols = section(i);
    if (symbols.sh_type != SHT_DYNSYM) continue;
    const Elf64_Shdr strings = section(symbols.sh_link);
    const uint64_t bytes = std::min<uint64_t>(symbols.sh_size, file.size());
    for (uint64_t offset = 0; offset + sizeof(Elf64_Sym) <= bytes; offset += sizeof(Elf64_Sym)) {
      const auto symbol = at<Elf64_Sym>(file, symbols.sh_offset + offset);
      const uint64_t name = strings.sh_offset + symbol.st_name;
      if (!is_export(symbol) || name >= file.size()) continue;
      if (std::string text = file.c_str() + name; text != STRATA_PLUGIN_ENTRY) names.push_back(std::move(text));
    }
  }
  return names;
}

}  // namespace strata::cli

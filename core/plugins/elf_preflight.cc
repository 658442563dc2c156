#include "core/plugins/elf_preflight.h"

#include <elf.h>

#include <cstring>
#include <fstream>
#include <string>

namespace strata {
namespace {

#if defined(__x86_64__)
constexpr Elf64_Half kMachine = EM_X86_64;
#elif defined(__aarch64__)
constexpr Elf64_Half kMachine = EM_AARCH64;
#else
#error "name this machine's ELF number here"
#endif

std::string machine_name(Elf64_Half machine) {
  switch (machine) {
    case EM_X86_64:
      return "x86-64";
    case EM_AARCH64:
      return "aarch64";
    case EM_386:
      return "i386";
    case EM_PPC64:
      return "ppc64";
    case EM_RISCV:
      return "riscv";
    default:
      return "ELF machine " + std::to_string(machine);
  }
}

bool read_at(std::ifstream& in, uint64_t offset, void* out, size_t bytes) {
  in.clear();
  in.seekg(static_cast<std::streamoff>(offset));
  in.read(static_cast<char*>(out), static_cast<std::streamsize>(bytes));
  return static_cast<size_t>(in.gcount()) == bytes;
}

}  // namespace

Status elf_preflight(const std::filesystem::path& library) {
  const auto bad = [&](const std::string& text) {
    return Status(STRATA_FAILED_PRECONDITION, library.string() + ": " + text);
  };
  std::error_code error;
  const auto kind = std::filesystem::status(library, error).type();
  if (kind == std::filesystem::file_type::not_found) return {STRATA_NOT_FOUND, library.string() + ": no such file"};
  if (kind != std::filesystem::file_type::regular) return bad("is not a regular file");
  const uint64_t size = std::filesystem::file_size(library, error);
  std::ifstream in(library, std::ios::binary);
  if (error || !in) return bad("cannot be opened for reading");

  Elf64_Ehdr header{};
  const bool whole = read_at(in, 0, &header, sizeof header);
  if (size < SELFMAG || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
    return bad("is not a shared library (no ELF magic; " + std::to_string(size) + " bytes)");
  if (!whole) return bad("is cut off inside its ELF header (" + std::to_string(size) + " bytes)");
  if (header.e_ident[EI_CLASS] != ELFCLASS64) return bad("is a 32-bit library, this process is 64-bit");
  if (header.e_ident[EI_DATA] != ELFDATA2LSB) return bad("is big-endian, this machine is little-endian");
  if (header.e_machine != kMachine)
    return bad("is built for " + machine_name(header.e_machine) + ", this machine is " + machine_name(kMachine));
  if (header.e_type != ET_DYN)
    return bad("is no shared library (ELF type " + std::to_string(header.e_type) + ", wanted " +
               std::to_string(ET_DYN) + ")");
  if (header.e_phentsize != sizeof(Elf64_Phdr) || header.e_phnum == 0)
    return bad("has no program headers (" + std::to_string(header.e_phnum) + " of " +
               std::to_string(header.e_phentsize) + " bytes)");

  for (Elf64_Half i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment{};
    uint64_t at = 0, end = 0;
    if (__builtin_add_overflow(header.e_phoff, uint64_t{i} * sizeof segment, &at) || at > size ||
        !read_at(in, at, &segment, sizeof segment))
      return bad("is truncated: program header " + std::to_string(i) + " lies behind its " + std::to_string(size) +
                 " bytes");
    if (segment.p_type != PT_LOAD) continue;
    if (__builtin_add_overflow(segment.p_offset, segment.p_filesz, &end) || end > size)
      return bad("is truncated: segment " + std::to_string(i) + " ends at byte " + std::to_string(end) +
                 ", the file has " + std::to_string(size));
  }
  return Ok();
}

}  // namespace strata

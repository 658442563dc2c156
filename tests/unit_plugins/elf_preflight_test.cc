// Files that look like libraries and are none: each must be refused by reading, before the dynamic loader maps it.
#include "core/plugins/elf_preflight.h"

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/unit_plugins/variant_dir.h"

namespace strata {
namespace {

using test::VariantDir;
using ::testing::HasSubstr;

struct ElfPreflight : ::testing::Test {
  VariantDir dir;
  std::string good = VariantDir::read(VariantDir::library("good"));

  std::string refused(const std::string& bytes) {
    dir.write("x.so", bytes);
    const Status status = elf_preflight(dir.path() / "x.so");
    EXPECT_EQ(status.code(), STRATA_FAILED_PRECONDITION);
    return status.text();
  }
  std::string patched(size_t at, unsigned char value) {
    std::string bytes = good;
    bytes[at] = static_cast<char>(value);
    return bytes;
  }
};

TEST_F(ElfPreflight, AGoodLibraryPasses) {
  const Status status = elf_preflight(VariantDir::library("good"));
  EXPECT_TRUE(status.ok()) << status.text();
}

TEST_F(ElfPreflight, NoLibraryAtAll) {
  EXPECT_EQ(elf_preflight(dir.path() / "none.so").code(), STRATA_NOT_FOUND);
  EXPECT_THAT(elf_preflight(dir.path()).text(), HasSubstr("is not a regular file"));
  EXPECT_THAT(refused(""), HasSubstr("no ELF magic; 0 bytes"));
  EXPECT_THAT(refused("#!/bin/sh\necho hello\n"), HasSubstr("is not a shared library"));
  EXPECT_THAT(refused("\x7f"
                      "ELF"),
              HasSubstr("cut off inside its ELF header"));
}

TEST_F(ElfPreflight, OtherMachines) {
  EXPECT_THAT(refused(patched(EI_CLASS, ELFCLASS32)), HasSubstr("32-bit"));
  EXPECT_THAT(refused(patched(EI_DATA, ELFDATA2MSB)), HasSubstr("big-endian"));
  EXPECT_THAT(refused(patched(offsetof(Elf64_Ehdr, e_machine), EM_PPC64)), HasSubstr("is built for ppc64"));
  EXPECT_THAT(refused(patched(offsetof(Elf64_Ehdr, e_machine), EM_RISCV)), HasSubstr("is built for riscv"));
  EXPECT_THAT(refused(patched(offsetof(Elf64_Ehdr, e_type), ET_REL)), HasSubstr("no shared library (ELF type 1"));
}

// At every length that cuts off loadable bytes the file is refused; nothing here ever maps it.
TEST_F(ElfPreflight, TruncatedAtAnyByte) {
  Elf64_Ehdr header;
  std::memcpy(&header, good.data(), sizeof header);
  size_t needed = 0;
  for (int i = 0; i < header.e_phnum; ++i) {
    Elf64_Phdr segment;
    std::memcpy(&segment, good.data() + header.e_phoff + i * sizeof segment, sizeof segment);
    if (segment.p_type == PT_LOAD) needed = std::max<size_t>(needed, segment.p_offset + segment.p_filesz);
  }
  ASSERT_GT(needed, 1000u);
  for (size_t length = 0; length < needed; length += length < 1200 ? 13 : 997)
    ASSERT_NE(refused(good.substr(0, length)), "") << length;
  EXPECT_THAT(refused(good.substr(0, needed - 1)), HasSubstr("is truncated: segment"));
  dir.write("x.so", good.substr(0, needed));
  EXPECT_TRUE(elf_preflight(dir.path() / "x.so").ok()) << "only section headers are missing: it can be mapped";
}

TEST_F(ElfPreflight, WildNumbersInTheHeader) {
  std::string bytes = good;
  const uint64_t wild = ~uint64_t{0} - 8;
  std::memcpy(bytes.data() + offsetof(Elf64_Ehdr, e_phoff), &wild, sizeof wild);
  EXPECT_THAT(refused(bytes), HasSubstr("is truncated: program header 0"));
  EXPECT_THAT(refused(patched(offsetof(Elf64_Ehdr, e_phentsize), 7)), HasSubstr("no program headers"));
}

}  // namespace
}  // namespace strata

// variant_dir.h - a directory of test plugins: libraries out of variant.cc, TOML files out of the test.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace strata::test {

class VariantDir {
 public:
  VariantDir() {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    path_ = std::filesystem::path(::testing::TempDir()) /
            (std::string("strata_") + info->test_suite_name() + "_" + info->name());
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~VariantDir() { std::filesystem::remove_all(path_); }

  const std::filesystem::path& path() const { return path_; }

  // A TOML that is right in every way; `more` is appended.
  static std::string good_toml(const std::string& id, const std::string& more = "",
                               const std::string& interfaces = "\"strata.offload/1\"") {
    return "manifest_version = 1\nid = \"" + id + "\"\nname = \"A test\"\nversion = \"1.2.3\"\nlicense = \"MIT\"\n" +
           "[abi]\nmajor = 1\nmin_host_minor = 0\n[library]\npath = \"" + id + ".so\"\n[provides]\ninterfaces = [" +
           interfaces + "]\n" + more;
  }

  // A file that is there is replaced, not written over: it may be mapped, and a mapped library cut short under the
  // process kills it at exit.
  void write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::filesystem::remove(path_ / name);
    std::ofstream(path_ / name, std::ios::binary) << text;
  }
  static std::string read(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  static std::filesystem::path library(const std::string& variant) {
    return std::filesystem::path(STRATA_VARIANTS) / (variant + ".so");
  }

  // Library and TOML of a variant, in `sub`.
  void install(const std::string& variant, const std::string& toml = "", const std::string& sub = "") const {
    write(sub + (sub.empty() ? "" : "/") + variant + ".toml", toml.empty() ? good_toml(variant) : toml);
    std::filesystem::remove(path_ / sub / (variant + ".so"));
    std::filesystem::copy_file(library(variant), path_ / sub / (variant + ".so"));
  }

 private:
  std::filesystem::path path_;
};

}  // namespace strata::test

// toml_doc.h - a TOML text as a flat list of (path, value, position) in file order; the only user of toml++.
//
// Training manifests and plugin TOMLs are both read through this, so that both report positions and values the same
// way. The toml++ library is linked, not header-only: its header-only form aborts on some malformed input.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/status.h"

namespace strata {

struct TomlValue {
  enum class Kind { kBool, kInt, kFloat, kString, kArray, kTable, kDate };
  Kind kind = Kind::kTable;
  bool b = false;
  int64_t i = 0;
  double f = 0;
  std::string s;
  std::vector<TomlValue> items;  // kArray

  bool is_text(const char* text) const { return kind == Kind::kString && s == text; }
};

struct TomlEntry {
  std::string path;   // "zero_optimization.stage"; a name that is no bare key is quoted, so '.' always separates
  TomlValue value;    // kTable: the section itself; its keys follow as entries of their own
  std::string where;  // "file:line:column"
};

// Reads a regular file of at most `max_bytes`. NOT_FOUND, INVALID_ARGUMENT (no regular file, too long).
Status read_text_file(const std::filesystem::path& path, size_t max_bytes, std::string* text);

// INVALID_ARGUMENT "name:line:column: text": the first syntax error.
Status parse_toml(const std::string& text, const std::string& name, std::vector<TomlEntry>* entries);

// A value as an error shows it: `"cpu"`, `0.5`, `true`, `a table`; one line, shortened.
std::string show(const TomlValue& value);
// One printable line of UTF-8, of about `limit` bytes at most, out of anything.
std::string printable(std::string_view text, size_t limit = 80);

// "zero_optimization.stage" -> "zero_optimization" and "stage"; the parent of a top-level key is "".
std::string parent_of(const std::string& path);
std::string leaf_of(const std::string& path);

// The whole number a value stands for: integers, and floats without a fraction (5e8). Says what is wrong otherwise.
Status whole_number(const TomlValue& value, int64_t* out);
// Any finite number.
Status finite_number(const TomlValue& value, double* out);

}  // namespace strata

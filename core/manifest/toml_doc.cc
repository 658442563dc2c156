#include "core/manifest/toml_doc.h"

#include <toml++/toml.h>

#include <algorithm>
#include <boost/locale/utf.hpp>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace strata {
namespace {

using Kind = TomlValue::Kind;

struct Positioned {
  TomlEntry entry;
  uint32_t line, column;
};

bool is_bare(std::string_view key) {
  return !key.empty() &&
         std::all_of(key.begin(), key.end(), [](unsigned char c) { return std::isalnum(c) || c == '_' || c == '-'; });
}

// A dot inside a quoted key is shown as U+2024, which looks like it: in a path '.' separates.
std::string join(const std::string& parent, std::string_view key) {
  std::string name = is_bare(key) ? std::string(key) : '"' + printable(key) + '"';
  for (size_t at = name.find('.'); at != std::string::npos; at = name.find('.', at)) name.replace(at, 1, "\u2024");
  return parent.empty() ? name : parent + "." + name;
}

std::string hex_text(unsigned char byte) {
  char hex[8];
  std::snprintf(hex, sizeof hex, "\\x%02x", byte);
  return hex;
}

TomlValue value_of(const toml::node& node) {
  TomlValue v;
  switch (node.type()) {
    case toml::node_type::boolean:
      v.kind = Kind::kBool;
      v.b = node.as_boolean()->get();
      break;
    case toml::node_type::integer:
      v.kind = Kind::kInt;
      v.i = node.as_integer()->get();
      break;
    case toml::node_type::floating_point:
      v.kind = Kind::kFloat;
      v.f = node.as_floating_point()->get();
      break;
    case toml::node_type::string:
      v.kind = Kind::kString;
      v.s = node.as_string()->get();
      break;
    case toml::node_type::array:
      v.kind = Kind::kArray;
      for (const toml::node& item : *node.as_array()) v.items.push_back(value_of(item));
      break;
    case toml::node_type::table:
      v.kind = Kind::kTable;
      break;
    default:
      v.kind = Kind::kDate;
      break;
  }
  return v;
}

void flatten(const toml::table& table, const std::string& parent, const std::string& name,
             std::vector<Positioned>* out) {
  for (const auto& [key, node] : table) {
    // A section that its children opened before its own header is where that is.
    const bool headed_later = node.source().begin.line > key.source().begin.line;
    const toml::source_position at = headed_later ? node.source().begin : key.source().begin;
    const std::string path = join(parent, key.str());
    const std::string where = name + ":" + std::to_string(at.line) + ":" + std::to_string(at.column);
    out->push_back({{path, value_of(node), where}, at.line, at.column});
    if (const toml::table* child = node.as_table()) flatten(*child, path, name, out);
  }
}

// `line`: of the error, if there is one.
Status flatten_text(const std::string& text, const std::string& name, std::vector<Positioned>* out, uint32_t* line) {
  try {
    flatten(toml::parse(std::string_view(text)), "", name, out);
    return Ok();
  } catch (const toml::parse_error& e) {
    const toml::source_position at = e.source().begin;
    *line = at.line;
    const size_t first = text.find_first_not_of(" \t\r\n");
    const bool is_json = first != std::string::npos && text[first] == '{';
    return {STRATA_INVALID_ARGUMENT, name + ":" + std::to_string(at.line) + ":" + std::to_string(at.column) + ": " +
                                         printable(e.description(), 300) +
                                         (is_json ? " (a manifest is TOML: a DeepSpeed configuration in JSON goes to "
                                                    "strata.deepspeed.initialize)"
                                                  : "")};
  }
}

std::string unused_key(const std::string& text) {
  std::string key = "the-section-this-line-is-in";
  while (text.find(key) != std::string::npos) key += '-';
  return key;
}

// The reader goes one call deeper for each table in a table.
Status check_depth(const std::string& text, const std::string& name) {
  constexpr int kMostDots = 1000;
  int line = 1, dots = 0;
  for (const char c : text) {
    dots = c == '\n' ? 0 : dots + (c == '.');
    line += c == '\n';
    if (dots <= kMostDots) continue;
    return {STRATA_INVALID_ARGUMENT,
            name + ":" + std::to_string(line) + ": more than " + std::to_string(kMostDots) + " dots in one line"};
  }
  return Ok();
}

// "; it first stands at m.toml:3:1" about what `line` may not define again; "" where that is not simple to tell: in an
// inline value, in an array of tables, with a '=' in its name.
std::string first_definition(const std::string& text, const std::string& name, uint32_t line) {
  size_t begin = 0;
  for (uint32_t l = 1; l < line; ++l) begin = text.find('\n', begin) + 1;
  const std::string before = text.substr(0, begin), mark = unused_key(text);
  std::string again = text.substr(begin, text.find_first_of("\r\n", begin) - begin);
  const bool is_header = again.find_first_not_of(" \t") == again.find('[');
  if (!is_header) again = again.substr(0, again.find('=')) + "=0";
  std::vector<Positioned> first, second, both;
  const auto reads = [&](const std::string& part, auto* out) { return flatten_text(part, name, out, &line).ok(); };
  // Where `before` goes on with the bare key or header, it is the value that is wrong.
  if (!reads(again, &second) || second.empty() || !reads(before + mark + "=0", &first) || reads(before + again, &both))
    return "";
  const auto here = std::find_if(first.begin(), first.end(), [&](auto& p) { return leaf_of(p.entry.path) == mark; });
  if (here == first.end() && !is_header) return "";
  const std::string section = is_header ? "" : parent_of(here->entry.path);
  const std::string whole = (section.empty() ? "" : section + ".") + second.back().entry.path;
  for (std::string path = whole; path != section; path = parent_of(path)) {
    for (const Positioned& p : first) {
      if (p.entry.path != path) continue;
      return path == whole || p.entry.value.kind != Kind::kArray ? "; it first stands at " + p.entry.where : "";
    }
  }
  return "";
}

}  // namespace

Status read_text_file(const std::filesystem::path& path, size_t max_bytes, std::string* text) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found)
    return {STRATA_NOT_FOUND, path.string() + ": no such file"};
  if (error) return {STRATA_NOT_FOUND, path.string() + ": " + error.message()};
  if (status.type() == std::filesystem::file_type::directory)
    return {STRATA_INVALID_ARGUMENT, path.string() + ": is a directory, a TOML file is wanted"};
  if (status.type() != std::filesystem::file_type::regular)
    return {STRATA_INVALID_ARGUMENT, path.string() + ": is not a regular file"};
  std::ifstream in(path, std::ios::binary);
  if (!in) return {STRATA_PERMISSION_DENIED, path.string() + ": cannot be opened for reading"};
  std::string read(max_bytes + 1, '\0');
  in.read(read.data(), static_cast<std::streamsize>(read.size()));
  if (in.bad()) return {STRATA_UNAVAILABLE, path.string() + ": cannot be read"};
  read.resize(static_cast<size_t>(in.gcount()));
  if (read.size() > max_bytes)
    return {STRATA_INVALID_ARGUMENT, path.string() + ": is longer than " + std::to_string(max_bytes) + " bytes"};
  *text = std::move(read);
  return Ok();
}

Status parse_toml(const std::string& text, const std::string& name, std::vector<TomlEntry>* entries) {
  STRATA_RETURN_IF_ERROR(check_depth(text, name));
  std::vector<Positioned> found;
  uint32_t line = 0;
  const Status read = flatten_text(text, name, &found, &line);
  const bool again = read.text().find(" existing ") != std::string::npos;
  if (!read.ok()) return {read.code(), read.text() + (again ? first_definition(text, name, line) : "")};
  std::stable_sort(found.begin(), found.end(), [](const Positioned& a, const Positioned& b) {
    return a.line != b.line ? a.line < b.line : a.column < b.column;
  });
  entries->clear();
  for (Positioned& p : found) entries->push_back(std::move(p.entry));
  return Ok();
}

std::string printable(std::string_view text, size_t limit) {
  namespace utf = boost::locale::utf;
  std::string out;
  for (const char *at = text.begin(), *before = at; at != text.end(); before = at) {
    if (out.size() >= limit) return out + "...";
    const utf::code_point c = utf::utf_traits<char>::decode(at, text.end());
    const bool is_character = utf::is_valid_codepoint(c);
    if (!is_character) at = before + 1;
    // Control characters of both sets, and what Unicode says begins a line.
    const bool shows = is_character && c >= 0x20 && !(c >= 0x7F && c < 0xA0) && c != 0x2028 && c != 0x2029;
    if (shows) {
      out.append(before, at);
    } else if (c == '\n') {
      out += "\\n";
    } else {
      for (; before != at; ++before) out += hex_text(static_cast<unsigned char>(*before));
    }
  }
  return out;
}

std::string show(const TomlValue& value) {
  switch (value.kind) {
    case Kind::kBool:
      return value.b ? "true" : "false";
    case Kind::kInt:
      return std::to_string(value.i);
    case Kind::kFloat: {
      std::ostringstream text;
      text.precision(17);
      text << value.f;
      // 17 digits are exact but ugly (0.10000000000000001): use the short form when it means the same number.
      std::ostringstream brief;
      brief.precision(10);
      brief << value.f;
      return std::strtod(brief.str().c_str(), nullptr) == value.f ? brief.str() : text.str();
    }
    case Kind::kString:
      return '"' + printable(value.s) + '"';
    case Kind::kArray:
      return "an array of " + std::to_string(value.items.size());
    case Kind::kTable:
      return "a table";
    case Kind::kDate:
      return "a date or time";
  }
  return "?";
}

std::string parent_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? "" : path.substr(0, dot);
}

std::string leaf_of(const std::string& path) {
  const size_t dot = path.rfind('.');
  return dot == std::string::npos ? path : path.substr(dot + 1);
}

Status whole_number(const TomlValue& value, int64_t* out) {
  if (value.kind == Kind::kInt) {
    *out = value.i;
    return Ok();
  }
  if (value.kind != Kind::kFloat) return {STRATA_INVALID_ARGUMENT, "must be a whole number, got " + show(value)};
  if (!std::isfinite(value.f) || std::trunc(value.f) != value.f)
    return {STRATA_INVALID_ARGUMENT, "must be a whole number, got " + show(value)};
  if (std::fabs(value.f) >= 9223372036854775808.0)
    return {STRATA_INVALID_ARGUMENT, "does not fit into 64 bits: " + show(value)};
  *out = static_cast<int64_t>(value.f);
  return Ok();
}

Status finite_number(const TomlValue& value, double* out) {
  if (value.kind == Kind::kInt) {
    *out = static_cast<double>(value.i);
    return Ok();
  }
  if (value.kind != Kind::kFloat || !std::isfinite(value.f))
    return {STRATA_INVALID_ARGUMENT, "must be a finite number, got " + show(value)};
  *out = value.f;
  return Ok();
}

}  // namespace strata

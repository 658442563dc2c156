#include "names.h"

#include <xxhash.h>

#include <cstdio>
#include <unordered_set>

namespace strata::checkpoint {
namespace {

constexpr size_t kLongestPath = 1024;

void append_hex(std::string& out, unsigned char c) {
  char hex[4];
  std::snprintf(hex, sizeof(hex), "%%%02X", c);
  out += hex;
}

void append_component(std::string& out, const std::string& part) {
  if (part.empty()) {
    out += "%00";
    return;
  }
  const bool dots = part.find_first_not_of('.') == std::string::npos;
  for (size_t i = 0; i < part.size(); ++i) {
    const auto c = static_cast<unsigned char>(part[i]);
    if (c == '%' || c < 0x20 || c == 0x7F || c == '/' || (dots && i == 0)) {
      append_hex(out, c);
    } else {
      out += part[i];
    }
  }
}

std::string shorten(std::string path, const std::string& name) {
  if (path.size() <= kLongestPath) return path;
  const XXH128_hash_t h = XXH3_128bits(name.data(), name.size());
  char text[40];
  std::snprintf(text, sizeof(text), "%%h%016llx%016llx", static_cast<unsigned long long>(h.high64),
                static_cast<unsigned long long>(h.low64));
  return text;
}

}  // namespace

std::string escape_component(const std::string& name) {
  std::string out;
  append_component(out, name);
  return shorten(std::move(out), name);
}

std::string escape_path(const std::string& name) {
  std::string out;
  size_t begin = 0;
  while (true) {
    const size_t end = name.find('/', begin);
    append_component(out, name.substr(begin, end == std::string::npos ? end : end - begin));
    if (end == std::string::npos) break;
    out += '/';
    begin = end + 1;
  }
  return shorten(std::move(out), name);
}

void resolve_prefixes(std::vector<std::string*>& paths) {
  std::unordered_set<std::string> groups;
  for (const std::string* path : paths) {
    for (size_t slash = path->find('/'); slash != std::string::npos; slash = path->find('/', slash + 1)) {
      groups.insert(path->substr(0, slash));
    }
  }
  for (std::string* path : paths) {
    if (groups.count(*path)) *path += "%_";
  }
}

}  // namespace strata::checkpoint

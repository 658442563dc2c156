#include "latest.h"

#include "error.h"
#include "files.h"
#include "model.h"
#include "replace.h"

namespace strata::checkpoint {
namespace {

std::string next_path(const std::string& root) { return root + "/.latest.next"; }

}  // namespace

std::string read_tag(const std::string& path) {
  const std::string text = read_text_file(path);
  const std::string tag = text.substr(0, text.find('\n'));
  if (const std::string why = why_not_a_name(tag); !why.empty()) {
    raise(STRATA_DATA_LOSS, path, ": does not hold a tag: '", tag, "' ", why);
  }
  return tag;
}

std::string announced_in(const std::string& root) {
  const std::string next = next_path(root);
  try {
    if (!exists(next)) return "";
    const std::string tag = read_tag(next);
    return exists(directory_of(root, tag)) ? tag : "";
  } catch (const Error& e) {
    if (e.code() == STRATA_NOT_FOUND) return "";  // it just became the latest
    throw;
  }
}

std::string announcement_path(const std::string& root, const std::string& tag) { return root + "/." + tag + ".latest"; }

void write_announcement(const std::string& root, const std::string& tag) {
  write_file(announcement_path(root, tag), tag + "\n");
}

void announce(const std::string& root, const std::string& tag) {
  rename_over(announcement_path(root, tag), next_path(root));
  sync_path(root);
}

void name_latest(const std::string& root) {
  try {
    rename_over(next_path(root), root + "/latest");
  } catch (const Error& e) {
    if (e.code() != STRATA_NOT_FOUND) throw;
  }
  sync_path(root);
}

}  // namespace strata::checkpoint

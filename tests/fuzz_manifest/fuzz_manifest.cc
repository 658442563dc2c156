// fuzz_manifest.cc - any bytes as a training manifest, as an override and as a plugin's TOML.
//
// Nothing may crash, hang or throw, and what comes back must keep the promises of manifest.h: an error has at most
// kMaxManifestErrors lines, each printable and naming the file; success is complete, inside its ranges, and the same
// again. Entry point of libFuzzer; the normal build calls it from corpus_test.cc.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/manifest/batch.h"
#include "core/manifest/manifest.h"
#include "core/manifest/plugin_toml.h"

namespace strata {
namespace {

void require(bool holds, const char* what, const std::string& text) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_manifest: %s\n%s\n", what, text.c_str());
  std::abort();
}

void check_error(const Status& status) {
  const std::string& text = status.text();
  size_t lines = 1;
  for (const char c : text) {
    require(c == '\n' || static_cast<unsigned char>(c) >= 0x20, "an error holds a control character", text);
    lines += c == '\n';
  }
  require(!text.empty() && lines <= kMaxManifestErrors + 1, "an error has too few or too many lines", text);
  require(text.size() < 2000 * lines, "an error line is too long", text);
  require(text.rfind("fuzz.toml", 0) == 0 || text.rfind("override ", 0) == 0, "an error names no place", text);
}

void check_settings(Settings s) {
  const ZeroSettings& z = s.zero_optimization;
  require(z.stage >= 0 && z.stage <= 3 && z.reduce_bucket_size > 0 && z.sub_group_size > 0, "sizes", "");
  require(std::isfinite(s.optimizer.lr) && s.optimizer.betas[1] < 1 && !s.fp16_enabled, "optimizer", "");
  require(z.stage == 3 || z.offload_param.device == OffloadDevice::kNone, "offload_param below stage 3", "");
  for (const int64_t world : {int64_t{1}, int64_t{7}, INT64_MAX}) {
    Settings copy = s;
    if (!resolve_batch(world, &copy).ok()) continue;
    int64_t total = 0;
    require(!__builtin_mul_overflow(copy.train_micro_batch_size_per_gpu, copy.gradient_accumulation_steps, &total) &&
                !__builtin_mul_overflow(total, world, &total) && total == copy.train_batch_size && total > 0,
            "the batch rule does not hold", "");
  }
}

void read(const std::string& text, const Overrides& overrides) {
  Settings first, second;
  std::vector<std::string> warnings;
  const Status status = read_manifest_text(text, "fuzz.toml", overrides, &first, &warnings);
  const Status again = read_manifest_text(text, "fuzz.toml", overrides, &second, nullptr);
  require(status.text() == again.text(), "two readings differ", status.text() + "\n" + again.text());
  if (!status.ok()) return check_error(status);
  require(first.given == second.given, "two readings differ", "");
  check_settings(first);
}

}  // namespace
}  // namespace strata

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  strata::read(text, {});
  strata::read("", {text});
  strata::PluginToml toml;
  const strata::Status status = strata::parse_plugin_toml(text, "fuzz.toml", &toml);
  strata::require(status.ok() || !status.text().empty(), "an error without a text", "");
  strata::require(!status.ok() || (!toml.id.empty() && !toml.library.empty()), "a plugin without an id", "");
  return 0;
}

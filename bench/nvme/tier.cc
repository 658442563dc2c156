#include "bench/nvme/tier.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdio>

#include "core/plugins/event.h"
#include "host_memory/host_memory.h"
#include "strata/plugin.h"

namespace strata::bench {
namespace {

void expect_ok(const Status& status) {
  if (!status.ok()) die(status.text());
}

void to_stderr(strata_log_level, const std::string&, const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
}

strata_option option(const char* key, strata_option_type type, int64_t i, const char* s) {
  return {sizeof(strata_option), STRATA_ABI_MINOR, key, type, 0, i, 0, s};
}

}  // namespace

Tier::Tier(const std::string& paths, int64_t probe_ms) : host_(to_stderr, STRATA_LOG_INFO, 2) {
  void* handle = dlopen(STRATA_PLUGIN_DIR "/offload_nvme.so", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) die(dlerror());
  const auto entry = reinterpret_cast<strata_plugin_entry_fn>(dlsym(handle, STRATA_PLUGIN_ENTRY));
  api_ = static_cast<const strata_offload_api*>(entry(STRATA_ABI_MINOR)->get_interface(STRATA_OFFLOAD));
  const strata_option items[] = {option("nvme_path", STRATA_OPT_STRING, 0, paths.c_str()),
                                 option("probe_ms", STRATA_OPT_INT, probe_ms, nullptr)};
  const strata_options options = {sizeof(options), STRATA_ABI_MINOR, items, 2, sizeof(strata_option)};
  strata_open_args args{};
  args.struct_size = sizeof(args);
  args.host = host_.c();
  args.options = &options;
  args.job = "bench";
  args.world = args.local_world = 1;
  args.deadline_ns = 60'000'000'000;
  expect_ok(take_failure(api_->open(&args, &self_)));
  expect_ok(take_failure(api_->alloc(self_, kBytes, "bench", &region_)));
  memory_ = static_cast<char*>(host_memory::allocate(kBytes));  // as device_host gives it to the core
  if (!memory_) die("no memory");
  expect_ok(take_failure(api_->register_memory(self_, memory_, kBytes)));
  for (uint64_t i = 0; i < kBytes; ++i) memory_[i] = static_cast<char>(i * 2654435761u >> 13);
  move("write");
}

Tier::~Tier() {
  api_->close(self_);
  host_memory::release(memory_, kBytes);
}

void Tier::move(const std::string& what) {
  if (what != "mixed") {
    const strata_io_args io = {sizeof(io), STRATA_ABI_MINOR, region_, 0, kBytes, memory_};
    expect_ok(take_failure((what == "read" ? api_->read : api_->write)(self_, &io, nullptr)));
    return;
  }
  const Event done[] = {Event::create(), Event::create()};
  for (const int half : {0, 1}) {
    const uint64_t at = half * kBytes / 2;
    const strata_io_args io = {sizeof(io), STRATA_ABI_MINOR, region_, at, kBytes / 2, memory_ + at};
    expect_ok(take_failure((half == 0 ? api_->read : api_->write)(self_, &io, done[half].get())));
  }
  for (const Event& each : done) expect_ok(each->wait(std::chrono::seconds(60)));
}

double Tier::rate(const std::string& what) {
  const double begin = seconds_now();
  move(what);
  return static_cast<double>(kBytes) / (seconds_now() - begin);
}

}  // namespace strata::bench

#pragma GCC visibility push(default)
extern "C" void* bench_tier_open(const char* paths, int64_t probe_ms) {
  return new strata::bench::Tier(paths, probe_ms);
}
extern "C" uint64_t bench_tier_bytes() { return strata::bench::kBytes; }
extern "C" double bench_tier_rate(void* tier, const char* what) {
  return static_cast<strata::bench::Tier*>(tier)->rate(what);
}
extern "C" void bench_tier_close(void* tier) { delete static_cast<strata::bench::Tier*>(tier); }
#pragma GCC visibility pop

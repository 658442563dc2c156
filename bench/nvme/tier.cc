#include "bench/nvme/tier.h"

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <utility>
#include <vector>

#include "host_memory/host_memory.h"
#include "strata/plugin.h"

namespace strata::bench {
namespace {

constexpr std::chrono::seconds kDeadline{60};
// An array of a part of the state, of three, and four buffers of them: two are read while two are written.
constexpr uint64_t kTransfer = uint64_t{16} << 20, kBuffers = 12, kAhead = 6;
static_assert(kBuffers * kTransfer <= kBytes && kBytes % kTransfer == 0);

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

Tier::Tier(const std::string& paths, int64_t probe_ms, uint64_t bytes)
    : host_(to_stderr, STRATA_LOG_INFO, 2), bytes_(bytes) {
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
  expect_ok(take_failure(api_->alloc(self_, bytes_, "bench", &region_)));
  memory_ = static_cast<char*>(host_memory::allocate(kBytes));  // as device_host gives it to the core
  if (!memory_) die("no memory");
  expect_ok(take_failure(api_->register_memory(self_, memory_, kBytes)));
  for (uint64_t i = 0; i < kBytes; ++i) memory_[i] = static_cast<char>(i * 2654435761u >> 13);
  for (uint64_t at = 0; at < bytes_; at += kBytes) move("write");
}

Tier::~Tier() {
  api_->close(self_);
  host_memory::release(memory_, kBytes);
}

void Tier::move(const std::string& what) {
  const uint64_t begin = std::exchange(next_, (next_ + kBytes) % bytes_);
  if (what != "mixed") {
    const strata_io_args io = {sizeof(io), STRATA_ABI_MINOR, region_, begin, kBytes, memory_};
    expect_ok(take_failure((what == "read" ? api_->read : api_->write)(self_, &io, nullptr)));
    return;
  }
  const Event done[] = {Event::create(), Event::create()};
  for (const int half : {0, 1}) {
    const uint64_t at = half * kBytes / 2;
    transfer(half == 1, begin + at, memory_ + at, kBytes / 2, done[half]);
  }
  for (const Event& each : done) expect_ok(each->wait(kDeadline));
}

void Tier::transfer(bool write, uint64_t at, char* memory, uint64_t bytes, const Event& done) {
  const strata_io_args io = {sizeof(io), STRATA_ABI_MINOR, region_, at, bytes, memory};
  expect_ok(take_failure((write ? api_->write : api_->read)(self_, &io, done.get())));
}

double Tier::rate(const std::string& what) {
  const double begin = seconds_now();
  move(what);
  return static_cast<double>(kBytes) / (seconds_now() - begin);
}

double Tier::pipeline_rate() {
  constexpr uint64_t kPieces = kPipelined / kTransfer;
  const uint64_t first = std::exchange(next_, (next_ + kPipelined) % bytes_);
  std::vector<Event> read(kBuffers), written(kBuffers);
  const auto begin_one = [&](bool write, uint64_t piece) {
    const uint64_t buffer = piece % kBuffers;
    Event& done = (write ? written : read)[buffer];
    done = Event::create();
    transfer(write, (first + piece * kTransfer) % bytes_, memory_ + buffer * kTransfer, kTransfer, done);
  };
  const double begin = seconds_now();
  uint64_t next = 0;  // to be read
  for (uint64_t piece = 0; piece < kPieces; ++piece) {
    for (; next < kPieces && next <= piece + kAhead; ++next) {
      if (next >= kBuffers) expect_ok(written[next % kBuffers]->wait(kDeadline));
      begin_one(false, next);
    }
    expect_ok(read[piece % kBuffers]->wait(kDeadline));
    begin_one(true, piece);
  }
  for (const Event& each : written) expect_ok(each->wait(kDeadline));
  return 2 * static_cast<double>(kPipelined) / (seconds_now() - begin);
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
extern "C" double bench_tier_pipeline_rate(void* tier) {
  return static_cast<strata::bench::Tier*>(tier)->pipeline_rate();
}
// Of a file that is there, by fio.
extern "C" double bench_fio_rate(const char* what, const char* file) { return strata::bench::fio_rate(what, file); }
extern "C" void bench_tier_close(void* tier) { delete static_cast<strata::bench::Tier*>(tier); }
#pragma GCC visibility pop

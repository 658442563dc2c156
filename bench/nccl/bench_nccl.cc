// bench_nccl.cc - comm_nccl for Python: one instance of this process's rank, and loops of calls on a stream of torch's.
// What goes wrong ends the process, with the reason.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/plugins/host.h"
#include "strata/iface/collective.h"
#include "strata/plugin.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace strata;

struct Bench {
  Host host{[](strata_log_level, const std::string& domain, const std::string& text) {
              std::fprintf(stderr, "%s: %s\n", domain.c_str(), text.c_str());
            },
            STRATA_LOG_INFO, 1};
  const strata_collective_api* api = nullptr;
  strata_comm* comm = nullptr;
  int device = 0;
};

void must(strata_status status, const char* what) {
  if (status == STRATA_OK) return;
  std::fprintf(stderr, "%s: %s\n", what, take_failure(status).text().c_str());
  std::exit(1);
}

}  // namespace

// The rank comes from the environment.
EXPORT Bench* bench_open() {
  void* library = ::dlopen(STRATA_PLUGIN_DIR "/comm_nccl.so", RTLD_NOW | RTLD_LOCAL);
  using Entry = const strata_plugin* (*)(uint32_t);
  auto entry = library ? reinterpret_cast<Entry>(::dlsym(library, "strata_plugin_entry_v1")) : nullptr;
  if (!entry) {
    std::fprintf(stderr, "%s\n", ::dlerror());
    std::exit(1);
  }
  auto* bench = new Bench;
  bench->api = static_cast<const strata_collective_api*>(entry(STRATA_ABI_MINOR)->get_interface(STRATA_COLLECTIVE));
  strata_open_args args{};
  args.struct_size = sizeof(args);
  args.host = bench->host.c();
  args.rank = -1;
  args.world = -1;
  args.deadline_ns = 60'000'000'000;
  must(bench->api->open(&args, &bench->comm), "open");
  strata_collective_caps caps{};
  caps.struct_size = sizeof(caps);
  must(bench->api->caps(bench->comm, &caps), "caps");
  bench->device = caps.local_rank;
  return bench;
}

EXPORT void* bench_alloc(Bench* bench, uint64_t bytes) {
  void* out = nullptr;
  must(bench->api->alloc(bench->comm, bytes, &out), "alloc");
  return out;
}

// `count` is what strata_coll_item says; bf16.
EXPORT void bench_run(Bench* bench, int reduce, const void* in, void* out, uint64_t count, void* stream, int times) {
  const strata_coll_item item = {sizeof(item), STRATA_ABI_MINOR, in, out, count, STRATA_BF16, STRATA_BF16};
  const strata_stream on = {sizeof(on), STRATA_ABI_MINOR, STRATA_CUDA, bench->device, stream};
  strata_coll_args args{};
  args.struct_size = sizeof(args);
  args.items = &item;
  args.item_count = 1;
  args.item_stride = sizeof(item);
  args.label = "bench";
  args.deadline_ns = -1;
  args.stream = &on;
  const auto call = reduce ? bench->api->reduce_scatter : bench->api->all_gather;
  for (int k = 0; k < times; ++k) must(call(bench->comm, &args, nullptr), reduce ? "reduce_scatter" : "all_gather");
}

EXPORT void bench_close(Bench* bench) {
  bench->api->close(bench->comm);
  delete bench;
}

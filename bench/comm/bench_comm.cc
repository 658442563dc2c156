// bench_comm.cc - comm_local against Open MPI: the same operation on the same bytes, between 2 processes.
//
//   mpirun -np 2 bench_comm allgather       64 MiB gathered, each rank gives half, in place on both sides
//   mpirun -np 2 bench_comm reducescatter   64 MiB in, half of it out, in fp32 and in bfloat16 (MPI by a user's
//   operation)
//
// Both run interleaved in one process, because the machine's level drifts: every round times one after the other, from
// a common start to the slower rank's end. The figure is the ratio of the medians. MPI works in ordinary memory on huge
// pages, comm_local in memory of its alloc, as the engine uses it. Results are compared before anything is timed. The
// last line is JSON.
#include <dlfcn.h>
#include <mpi.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/plugins/host.h"
#include "strata/iface/collective.h"
#include "strata/plugin.h"

namespace strata::bench {
namespace {

constexpr uint64_t kBytes = uint64_t{64} << 20;
constexpr int kWarmUp = 3;
constexpr int kRounds = 31;

void stop(const std::string& why) {
  std::fprintf(stderr, "bench_comm: %s\n", why.c_str());
  MPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

// ---- the two sides ----

class CommLocal {
 public:
  CommLocal(int rank, int world) : host_([](auto, const auto&, const auto&) {}, STRATA_LOG_WARN, 1) {
    void* library = dlopen(STRATA_PLUGIN_DIR "/comm_local.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) stop(dlerror());
    auto entry = reinterpret_cast<strata_plugin_entry_fn>(dlsym(library, STRATA_PLUGIN_ENTRY));
    api_ = static_cast<const strata_collective_api*>(entry(STRATA_ABI_MINOR)->get_interface(STRATA_COLLECTIVE));
    int leader = static_cast<int>(getpid());
    MPI_Bcast(&leader, 1, MPI_INT, 0, MPI_COMM_WORLD);
    const std::string job = "bench." + std::to_string(leader);
    strata_open_args args{};
    args.struct_size = sizeof(args);
    args.host = host_.c();
    args.job = job.c_str();
    args.rank = args.local_rank = rank;
    args.world = args.local_world = world;
    args.deadline_ns = 60'000'000'000;
    check(api_->open(&args, &comm_));
  }
  ~CommLocal() { api_->close(comm_); }

  char* alloc(uint64_t bytes) {
    void* out = nullptr;
    check(api_->alloc(comm_, bytes, &out));
    return static_cast<char*>(out);
  }
  void all_gather(const void* in, void* out, uint64_t count) { run(api_->all_gather, in, out, count, STRATA_F32); }
  void reduce_scatter(const void* in, void* out, uint64_t count, strata_dtype dtype) {
    run(api_->reduce_scatter, in, out, count, dtype);
  }

 private:
  void check(strata_status code) {
    if (Status s = take_failure(code); !s.ok()) stop(s.text());
  }
  void run(decltype(strata_collective_api::all_gather) slot, const void* in, void* out, uint64_t count,
           strata_dtype dtype) {
    const strata_coll_item item = {sizeof(item), STRATA_ABI_MINOR, in, out, count, dtype, dtype};
    strata_coll_args args{};
    args.struct_size = sizeof(args);
    args.items = &item;
    args.item_count = 1;
    args.item_stride = sizeof(item);
    args.label = "bench";
    args.deadline_ns = -1;
    check(slot(comm_, &args, nullptr));
  }

  Host host_;
  const strata_collective_api* api_ = nullptr;
  strata_comm* comm_ = nullptr;
};

char* ordinary_memory(uint64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) stop("mmap failed");
  madvise(p, bytes, MADV_HUGEPAGE);
  return static_cast<char*>(p);
}

// a[i] += b[i] in bfloat16, rounded to nearest even.
void add_bf16(void* in, void* inout, int* count, MPI_Datatype*) {
  const auto* a = static_cast<const uint16_t*>(in);
  auto* b = static_cast<uint16_t*>(inout);
  for (int i = 0; i < *count; ++i) {
    const float sum = std::bit_cast<float>(static_cast<uint32_t>(b[i]) << 16) +
                      std::bit_cast<float>(static_cast<uint32_t>(a[i]) << 16);
    const uint32_t bits = std::bit_cast<uint32_t>(sum);
    b[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

// ---- timing ----

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Reads more than the caches hold, so that nothing starts by writing back what the other side left dirty in them.
void settle_caches() {
  static const std::vector<uint64_t> clean((kBytes * 2) / sizeof(uint64_t), 1);
  uint64_t sum = 0;
  for (size_t i = 0; i < clean.size(); i += 8) sum += clean[i];
  if (sum == 0) stop("the clean buffer is not what it was");
}

// Milliseconds from a common start to the end on the slower rank.
double time_once(const std::function<void()>& work) {
  settle_caches();
  MPI_Barrier(MPI_COMM_WORLD);
  const double start = MPI_Wtime();
  work();
  double took = MPI_Wtime() - start;
  MPI_Allreduce(MPI_IN_PLACE, &took, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return took * 1e3;
}

struct Pair {
  double ours, theirs;            // medians
  double ours_best, theirs_best;  // for a look at a busy machine
  double ratio() const { return theirs / ours; }
};

Pair compare(const std::function<void()>& ours, const std::function<void()>& theirs) {
  std::vector<double> a, b;
  for (int round = -kWarmUp; round < kRounds; ++round) {
    const double x = time_once(ours);
    const double y = time_once(theirs);
    if (round < 0) continue;
    a.push_back(x);
    b.push_back(y);
  }
  return {median(a), median(b), *std::min_element(a.begin(), a.end()), *std::min_element(b.begin(), b.end())};
}

std::string machine() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) {
      return line.substr(line.find(':') + 2) + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores";
    }
  }
  return std::to_string(std::thread::hardware_concurrency()) + " cores";
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  MPI_Get_library_version(text, &length);
  return std::string(text).substr(0, std::string(text).find(','));
}

void print(int rank, const char* name, double value, double target, const std::string& extra) {
  if (rank != 0) return;
  std::printf(
      "{\"name\": \"%s\", \"value\": %.3f, \"target\": %.1f, \"unit\": \"x\", \"better\": \"higher\", \"against\": "
      "\"%s, 2 "
      "processes, 64 MiB, same run\", \"machine\": \"%s\", %s}\n",
      name, value, target, mpi_version().c_str(), machine().c_str(), extra.c_str());
}

std::string fields(const std::string& prefix, const Pair& pair) {
  char text[400];
  const char* p = prefix.c_str();
  std::snprintf(text, sizeof(text),
                "\"%sours_ms\": %.3f, \"%sopen_mpi_ms\": %.3f, \"%sratio\": %.3f, \"%sours_best_ms\": %.3f, "
                "\"%sopen_mpi_best_ms\": %.3f",
                p, pair.ours, p, pair.theirs, p, pair.ratio(), p, pair.ours_best, p, pair.theirs_best);
  return text;
}

// ---- the two figures ----

void all_gather(int rank, CommLocal& local) {
  const uint64_t half = kBytes / 2;
  char* mine = local.alloc(kBytes);
  char* theirs = ordinary_memory(kBytes);
  std::memset(mine, 0, kBytes);
  std::memset(theirs, 0, kBytes);
  for (char* base : {mine, theirs}) {
    auto* numbers = reinterpret_cast<uint32_t*>(base + static_cast<uint64_t>(rank) * half);
    for (uint64_t i = 0; i < half / 4; ++i) numbers[i] = static_cast<uint32_t>(i * 3 + static_cast<uint64_t>(rank));
  }
  auto ours = [&] { local.all_gather(mine + static_cast<uint64_t>(rank) * half, mine, half / 4); };
  auto mpi = [&] {
    MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, theirs, static_cast<int>(half / 4), MPI_FLOAT, MPI_COMM_WORLD);
  };
  ours();
  mpi();
  if (std::memcmp(mine, theirs, kBytes) != 0) stop("the two all-gathers differ");
  const Pair pair = compare(ours, mpi);
  print(rank, "comm_local_allgather_vs_mpi", pair.ratio(), 1.7, fields("", pair));
}

Pair reduce_scatter(int rank, CommLocal& local, strata_dtype dtype) {
  const uint64_t size = dtype == STRATA_F32 ? 4 : 2;
  const uint64_t count = kBytes / 2 / size;
  char* in = local.alloc(kBytes);
  char* out = local.alloc(kBytes / 2);
  char* mpi_in = ordinary_memory(kBytes);
  char* mpi_out = ordinary_memory(kBytes / 2);
  for (uint64_t i = 0; i < 2 * count; ++i) {
    const float value = static_cast<float>((i * 7 + static_cast<uint64_t>(rank)) % 251) * 0.125f;
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (size == 4) std::memcpy(in + i * 4, &bits, 4);
    if (size == 2) std::memcpy(in + i * 2, reinterpret_cast<const char*>(&bits) + 2, 2);
  }
  std::memcpy(mpi_in, in, kBytes);
  MPI_Op op = MPI_SUM;
  if (size == 2) MPI_Op_create(add_bf16, 1, &op);
  auto ours = [&] { local.reduce_scatter(in, out, count, dtype); };
  auto mpi = [&] {
    MPI_Reduce_scatter_block(mpi_in, mpi_out, static_cast<int>(count), size == 4 ? MPI_FLOAT : MPI_UINT16_T, op,
                             MPI_COMM_WORLD);
  };
  ours();
  mpi();
  if (std::memcmp(out, mpi_out, kBytes / 2) != 0) stop("the two reduce-scatters differ");
  return compare(ours, mpi);
}

int run(const std::string& what) {
  int rank = 0, world = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
  if (world != 2 || (what != "allgather" && what != "reducescatter")) {
    if (rank == 0) std::fprintf(stderr, "usage: mpirun -np 2 bench_comm allgather|reducescatter\n");
    return 2;
  }
  CommLocal local(rank, world);
  if (what == "allgather") {
    all_gather(rank, local);
    return 0;
  }
  const Pair f32 = reduce_scatter(rank, local, STRATA_F32);
  const Pair bf16 = reduce_scatter(rank, local, STRATA_BF16);
  // The figure is the smaller of the two.
  print(rank, "comm_local_reducescatter_vs_mpi", std::min(f32.ratio(), bf16.ratio()), 5.0,
        fields("fp32_", f32) + ", " + fields("bf16_", bf16));
  return 0;
}

}  // namespace
}  // namespace strata::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  const int code = strata::bench::run(argc > 1 ? argv[1] : "");
  MPI_Finalize();
  return code;
}

// Every operation, against the reference, bit for bit: worlds 1 to 4, as threads and as processes.
//
// Each test runs a group of items of several sizes in one call: nothing, less than a vector, odd, several rounds of
// all_reduce, and enough bytes that outputs are streamed past the caches.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ranks.h"
#include "reference.h"

namespace strata::test {
namespace {

const std::vector<uint64_t> kCounts = {0, 1, 33, 1000, 9'001};

class CollectiveOps : public CollectiveTest {};

INSTANTIATE_TEST_SUITE_P(All, CollectiveOps, testing::ValuesIn(all_setups({1, 2, 3, 4})),
                         [](const auto& p) { return setup_name(p.param); });

void fill(void* at, const std::vector<uint8_t>& bytes) {
  if (!bytes.empty()) std::memcpy(at, bytes.data(), bytes.size());
}

std::vector<uint8_t> cut(const std::vector<uint8_t>& bytes, uint64_t begin, uint64_t size) {
  return {bytes.begin() + static_cast<long>(begin), bytes.begin() + static_cast<long>(begin + size)};
}

// An output in ordinary memory, filled so that a missing write shows, with a guard behind it.
struct Output {
  explicit Output(uint64_t size) : bytes(size + 64, 0xa5) {}
  void* data() { return bytes.data(); }
  std::string check(const std::vector<uint8_t>& want, const std::string& what) {
    RETURN_IF_BAD(same_bytes(bytes.data(), want, what));
    return same_bytes(bytes.data() + bytes.size() - 64, std::vector<uint8_t>(64, 0xa5), what + ", behind the end");
  }
  std::vector<uint8_t> bytes;
};

std::string gather_case(Peer& peer, int rank, int world, strata_dtype dtype, bool in_place) {
  const uint64_t size = element_size(dtype);
  std::vector<strata_coll_item> items;
  std::vector<Output> outputs;
  std::vector<void*> memory;
  for (uint64_t count : kCounts) {
    const uint64_t slice = count * size;
    char* in = peer.alloc<char>(slice * (in_place ? static_cast<uint64_t>(world) : 1));
    memory.push_back(in);
    outputs.emplace_back(slice * static_cast<uint64_t>(world));
    char* own = in_place ? in + static_cast<uint64_t>(rank) * slice : in;
    fill(own, make_input(count, rank, count, dtype));
    items.push_back(item(own, in_place ? in : outputs.back().data(), count, dtype, dtype));
  }
  RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_gather, items)));
  for (size_t k = 0; k < kCounts.size(); ++k) {
    std::vector<uint8_t> want;
    for (int r = 0; r < world; ++r) {
      const std::vector<uint8_t> part = make_input(kCounts[k], r, kCounts[k], dtype);
      want.insert(want.end(), part.begin(), part.end());
    }
    RETURN_IF_BAD(in_place ? same_bytes(items[k].out, want, "in place") : outputs[k].check(want, "gather"));
  }
  for (void* p : memory) peer.api->free(peer.comm, p);
  return "";
}

TEST_P(CollectiveOps, AllGather) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    for (strata_dtype dtype : {STRATA_F32, STRATA_BF16, STRATA_U8, STRATA_I64, STRATA_F64}) {
      for (bool in_place : {false, true}) RETURN_IF_BAD(gather_case(peer, rank, GetParam().world, dtype, in_place));
    }
    return "";
  });
}

const std::vector<std::pair<strata_dtype, strata_dtype>> kSums = {
    {STRATA_F32, STRATA_F32}, {STRATA_BF16, STRATA_F32}, {STRATA_BF16, STRATA_BF16}, {STRATA_F16, STRATA_F16},
    {STRATA_F16, STRATA_F32}, {STRATA_F32, STRATA_BF16}, {STRATA_F32, STRATA_F16},   {STRATA_F16, STRATA_BF16}};

// The sum of what all ranks put into elements [begin, begin + count) of an item of `total` elements.
std::vector<uint8_t> summed(uint64_t seed, int world, uint64_t total, uint64_t begin, uint64_t count, strata_dtype in,
                            strata_dtype out) {
  std::vector<std::vector<uint8_t>> inputs;
  const uint64_t size = element_size(in);
  for (int r = 0; r < world; ++r) inputs.push_back(cut(make_input(seed, r, total, in), begin * size, count * size));
  return reference_sum(inputs, in, out);
}

std::string reduce_scatter_case(Peer& peer, int rank, int world, strata_dtype in, strata_dtype out, bool in_place) {
  std::vector<strata_coll_item> items;
  std::vector<Output> outputs;
  std::vector<void*> memory;
  for (uint64_t count : kCounts) {
    const uint64_t total = count * static_cast<uint64_t>(world);
    char* input = peer.alloc<char>(total * element_size(in));
    memory.push_back(input);
    fill(input, make_input(count, rank, total, in));
    outputs.emplace_back(count * element_size(out));
    void* to = in_place ? input + static_cast<uint64_t>(rank) * count * element_size(in) : outputs.back().data();
    items.push_back(item(input, to, count, in, out));
  }
  RETURN_IF_BAD(expect_ok(peer.call(peer.api->reduce_scatter, items)));
  for (size_t k = 0; k < kCounts.size(); ++k) {
    const uint64_t count = kCounts[k];
    const auto want =
        summed(count, world, count * static_cast<uint64_t>(world), static_cast<uint64_t>(rank) * count, count, in, out);
    RETURN_IF_BAD(in_place ? same_bytes(items[k].out, want, "in place") : outputs[k].check(want, "reduce_scatter"));
  }
  for (void* p : memory) peer.api->free(peer.comm, p);
  return "";
}

TEST_P(CollectiveOps, ReduceScatter) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    for (auto [in, out] : kSums) {
      RETURN_IF_BAD(reduce_scatter_case(peer, rank, GetParam().world, in, out, false));
      if (in == out) RETURN_IF_BAD(reduce_scatter_case(peer, rank, GetParam().world, in, out, true));
    }
    return "";
  });
}

std::string all_reduce_case(Peer& peer, int rank, int world, strata_dtype in, strata_dtype out, bool in_place,
                            const std::vector<uint64_t>& counts) {
  std::vector<strata_coll_item> items;
  std::vector<Output> outputs;
  std::vector<void*> memory;
  for (uint64_t count : counts) {
    void* input = peer.alloc(count * element_size(in));
    memory.push_back(input);
    fill(input, make_input(count, rank, count, in));
    outputs.emplace_back(count * element_size(out));
    items.push_back(item(input, in_place ? input : outputs.back().data(), count, in, out));
  }
  RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_reduce, items)));
  for (size_t k = 0; k < counts.size(); ++k) {
    const auto want = summed(counts[k], world, counts[k], 0, counts[k], in, out);
    RETURN_IF_BAD(in_place ? same_bytes(items[k].out, want, "in place") : outputs[k].check(want, "all_reduce"));
  }
  for (void* p : memory) peer.api->free(peer.comm, p);
  return "";
}

TEST_P(CollectiveOps, AllReduce) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    for (auto [in, out] : kSums) {
      RETURN_IF_BAD(all_reduce_case(peer, rank, GetParam().world, in, out, false, kCounts));
      if (element_size(out) <= element_size(in)) {
        RETURN_IF_BAD(all_reduce_case(peer, rank, GetParam().world, in, out, true, kCounts));
      }
    }
    return "";
  });
}

// More bytes than one round's scratch holds, so rounds alternate between the halves, and items straddle rounds.
TEST_P(CollectiveOps, AllReduceInManyRounds) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) {
    return all_reduce_case(peer, rank, GetParam().world, STRATA_F32, STRATA_F32, true,
                           {300'000, 7, 1'500'011, 250'000});
  });
}

TEST_P(CollectiveOps, Broadcast) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    for (int root = 0; root < GetParam().world; ++root) {
      std::vector<strata_coll_item> items;
      std::vector<Output> outputs;
      for (uint64_t count : kCounts) {
        void* in = peer.alloc(count * 2);
        if (rank == root) fill(in, make_input(count, root, count, STRATA_BF16));
        outputs.emplace_back(count * 2);
        // In place for odd roots; where it is not, ranks that are not the root give no input at all.
        const bool in_place = root % 2 == 1;
        items.push_back(item(rank == root || in_place ? in : nullptr, in_place ? in : outputs.back().data(), count,
                             STRATA_BF16, STRATA_BF16));
      }
      RETURN_IF_BAD(expect_ok(peer.call(peer.api->broadcast, items, 5, "broadcast", root)));
      for (size_t k = 0; k < kCounts.size(); ++k) {
        RETURN_IF_BAD(same_bytes(items[k].out, make_input(kCounts[k], root, kCounts[k], STRATA_BF16), "broadcast"));
      }
    }
    return "";
  });
}

TEST_P(CollectiveOps, AllToAll) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    const uint64_t world = static_cast<uint64_t>(GetParam().world);
    std::vector<strata_coll_item> items;
    std::vector<Output> outputs;
    for (uint64_t count : kCounts) {
      void* in = peer.alloc(count * world * 4);
      fill(in, make_input(count, rank, count * world, STRATA_F32));
      outputs.emplace_back(count * world * 4);
      items.push_back(item(in, outputs.back().data(), count, STRATA_F32, STRATA_F32));
    }
    RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_to_all, items)));
    for (size_t k = 0; k < kCounts.size(); ++k) {
      std::vector<uint8_t> want;
      const uint64_t slice = kCounts[k] * 4;
      for (int r = 0; r < GetParam().world; ++r) {
        const auto part =
            cut(make_input(kCounts[k], r, kCounts[k] * world, STRATA_F32), static_cast<uint64_t>(rank) * slice, slice);
        want.insert(want.end(), part.begin(), part.end());
      }
      RETURN_IF_BAD(outputs[k].check(want, "all_to_all"));
    }
    return "";
  });
}

// Large messages take the streaming path and, with three threads, the executor; unaligned ends included.
TEST_P(CollectiveOps, LargeMessagesOnSeveralThreads) {
  run_ranks(
      GetParam(),
      [&](Peer& peer, int rank) -> std::string {
        const uint64_t world = static_cast<uint64_t>(GetParam().world);
        const uint64_t count = 1'200'003;
        auto* in = peer.alloc<uint32_t>(count * world);
        for (uint64_t i = 0; i < count * world; ++i) in[i] = static_cast<uint32_t>(i * 7 + static_cast<uint64_t>(rank));
        std::vector<uint32_t> out(count * world + 2, 0xabababab);
        // One element into the vector, so that the output starts off a cache line.
        RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_gather, {item(in, &out[1], count, STRATA_F32, STRATA_F32)})));
        if (out[0] != 0xabababab || out.back() != 0xabababab) return "wrote outside of the output";
        for (uint64_t r = 0; r < world; ++r) {
          for (uint64_t i = 0; i < count; ++i) {
            if (out[1 + r * count + i] != i * 7 + r) return "element " + std::to_string(i) + " of " + std::to_string(r);
          }
        }
        auto* numbers = peer.alloc<float>(count * world);
        for (uint64_t i = 0; i < count * world; ++i)
          numbers[i] = static_cast<float>(i % 1000 + static_cast<uint64_t>(rank));
        std::vector<float> sums(count + 1, -1.0f);
        RETURN_IF_BAD(
            expect_ok(peer.call(peer.api->reduce_scatter, {item(numbers, &sums[1], count, STRATA_F32, STRATA_F32)})));
        for (uint64_t i = 0; i < count; ++i) {
          const uint64_t at = static_cast<uint64_t>(rank) * count + i;
          const float want = static_cast<float>((at % 1000) * world + world * (world - 1) / 2);
          if (sums[1 + i] != want) return "sum " + std::to_string(i);
        }
        return sums[0] == -1.0f ? "" : "wrote before the output";
      },
      3);
}

// The sum starts from rank 0's value, not from +0.0, and is taken in rank order whatever the sizes.
TEST_P(CollectiveOps, SumsInRankOrderFromTheFirstValue) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    auto* in = peer.alloc<float>(2);
    const float steps[] = {1e8f, 1.0f, -1e8f, 1.0f};
    in[0] = -0.0f;
    in[1] = steps[rank];
    float out[2] = {};
    RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_reduce, {item(in, out, 2, STRATA_F32, STRATA_F32)})));
    if (!std::signbit(out[0]) || out[0] != 0.0f) return "-0.0 was lost";
    float want = steps[0];
    for (int r = 1; r < GetParam().world; ++r) want += steps[r];
    return out[1] == want ? "" : "sum is " + std::to_string(out[1]);
  });
}

TEST_P(CollectiveOps, MemoryIsAlignedZeroAndMayComeAndGo) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    for (int round = 0; round < 6; ++round) {
      const uint64_t count = 5'000 + static_cast<uint64_t>(round) * 1'000;
      auto* in = peer.alloc<int64_t>(count);
      if (reinterpret_cast<uintptr_t>(in) % 4096 != 0) return "alloc is not 4096-aligned";
      for (uint64_t i = 0; i < count; ++i) {
        if (in[i] != 0) return "fresh memory is not zero";
        in[i] = round * 100 + rank;
      }
      std::vector<int64_t> out(count * static_cast<uint64_t>(GetParam().world));
      RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_gather, {item(in, out.data(), count, STRATA_I64, STRATA_I64)})));
      for (uint64_t i = 0; i < out.size(); ++i) {
        if (out[i] != round * 100 + static_cast<int64_t>(i / count)) return "stale memory of a peer was read";
      }
      peer.api->free(peer.comm, in);
    }
    return "";
  });
}

// Beyond 4 GiB into one allocation between threads, whose memory is there when it is touched; beyond 4 GiB of all
// allocations ever made between processes, whose large allocations are there at once.
TEST_P(CollectiveOps, OffsetsAreSixtyFourBit) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    const bool one_large = GetParam().threads || GetParam().world == 1;
    const uint64_t small = (2u << 20) - 4096;
    for (uint64_t passed = 0; !one_large && passed <= uint64_t{1} << 32; passed += small) {
      peer.api->free(peer.comm, peer.alloc(small));
    }
    char* base = static_cast<char*>(peer.alloc(one_large ? uint64_t{5} << 30 : 4096));
    auto* in = reinterpret_cast<int32_t*>(base + (one_large ? (uint64_t{9} << 29) + 12 : 0));
    in[0] = 1000 + rank;
    std::vector<int32_t> out(static_cast<size_t>(GetParam().world));
    RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_gather, {item(in, out.data(), 1, STRATA_F32, STRATA_F32)})));
    for (int r = 0; r < GetParam().world; ++r) {
      if (out[static_cast<size_t>(r)] != 1000 + r) return "rank " + std::to_string(r) + "'s value is wrong";
    }
    return "";
  });
}

TEST_P(CollectiveOps, ManyItemsInOneCall) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    const size_t n = 5'000;
    const size_t world = static_cast<size_t>(GetParam().world);
    auto* in = peer.alloc<float>(n);
    std::vector<float> gathered(n * world), reduced(n);
    std::vector<strata_coll_item> gathers, sums;
    for (size_t k = 0; k < n; ++k) {
      in[k] = static_cast<float>(k) + static_cast<float>(rank) * 0.25f;
      gathers.push_back(item(&in[k], &gathered[k * world], 1, STRATA_F32, STRATA_F32));
      sums.push_back(item(&in[k], &reduced[k], 1, STRATA_F32, STRATA_F32));
    }
    for (int again = 0; again < 3; ++again) {
      RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_gather, gathers)));
      RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_reduce, sums)));
    }
    for (size_t k = 0; k < n; ++k) {
      float total = static_cast<float>(k);
      for (size_t r = 0; r < world; ++r) {
        if (gathered[k * world + r] != static_cast<float>(k) + static_cast<float>(r) * 0.25f) return "gathered";
        if (r > 0) total += static_cast<float>(k) + static_cast<float>(r) * 0.25f;
      }
      if (reduced[k] != total) return "reduced";
    }
    return "";
  });
}

// What a call was given may be changed as soon as it returns: ranks of unequal pace, many times.
TEST_P(CollectiveOps, InputsMayChangeOnReturn) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    auto* in = peer.alloc<int64_t>(512);
    std::vector<int64_t> out(512 * static_cast<size_t>(GetParam().world));
    for (int64_t round = 0; round < 300; ++round) {
      for (int i = 0; i < 512; ++i) in[i] = round * 10 + rank;
      if ((round + rank) % 37 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
      RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_gather, {item(in, out.data(), 512, STRATA_I64, STRATA_I64)})));
      for (size_t i = 0; i < out.size(); ++i) {
        if (out[i] != round * 10 + static_cast<int64_t>(i / 512)) return "round " + std::to_string(round);
      }
      if (round % 3 == 0) RETURN_IF_BAD(expect_ok(peer.barrier()));
    }
    return "";
  });
}

TEST_P(CollectiveOps, CapsAndDoneEvent) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    strata_collective_caps caps{};
    caps.struct_size = sizeof(caps);
    RETURN_IF_BAD(expect_ok(take_failure(peer.api->caps(peer.comm, &caps))));
    if (caps.rank != rank || caps.world != GetParam().world || caps.local_rank != rank) return "caps: rank or world";
    if (std::string(caps.job) != peer.base.job) return "caps: job is " + std::string(caps.job);
    if (!(caps.flags & STRATA_COLL_FIXED_ORDER)) return "caps: flags";
    auto* in = peer.alloc<float>(1);
    std::vector<float> out(static_cast<size_t>(GetParam().world));
    Event done = Event::create();
    const std::vector<strata_coll_item> items = {item(in, out.data(), 1, STRATA_F32, STRATA_F32)};
    const strata_coll_args args = peer.args(items, 1, "with an event");
    RETURN_IF_BAD(expect_ok(take_failure(peer.api->all_gather(peer.comm, &args, done.get()))));
    return expect_ok(done->wait(std::chrono::seconds(20)));
  });
}

// ---- the forms of one arithmetic ----

// All 65,536 halves and bfloat16s as first input, odd companions as second: every form gives the reference's bits, also
// under a caller that flushes subnormals.
std::string all_bit_patterns(Peer& peer, int rank, bool flush) {
#if defined(__x86_64__)
  if (flush) _mm_setcsr(_mm_getcsr() | 0x8040);
#else
  (void)flush;
#endif
  const uint64_t count = 65'536;
  for (strata_dtype in : {STRATA_BF16, STRATA_F16}) {
    for (strata_dtype out : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
      auto input_of = [&](int r) {
        std::vector<uint8_t> bytes(count * 2);
        for (uint64_t i = 0; i < count; ++i) {
          const uint16_t bits = static_cast<uint16_t>(r == 0 ? i : i * 40'503 + 77);
          std::memcpy(&bytes[i * 2], &bits, 2);
        }
        return bytes;
      };
      void* input = peer.alloc(count * 2);
      fill(input, input_of(rank));
      Output output(count * element_size(out));
      const Status status = peer.call(peer.api->all_reduce, {item(input, output.data(), count, in, out)});
#if defined(__x86_64__)
      const unsigned mode = _mm_getcsr();
      if (flush && (mode & 0x8040) != 0x8040) return "the caller's floating-point mode was changed";
      _mm_setcsr(0x1f80);  // the reference below needs the plain mode
#endif
      RETURN_IF_BAD(expect_ok(status));
      std::vector<std::vector<uint8_t>> inputs;
      for (int r = 0; r < peer.base.world; ++r) inputs.push_back(input_of(r));
      RETURN_IF_BAD(
          output.check(reference_sum(inputs, in, out), "dtype " + std::to_string(in) + " to " + std::to_string(out)));
#if defined(__x86_64__)
      if (flush) _mm_setcsr(mode);
#endif
    }
  }
#if defined(__x86_64__)
  _mm_setcsr(0x1f80);
#endif
  return "";
}

class CommLocalForms : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, CommLocalForms, testing::Values("scalar", "avx2", "avx512", "auto"),
                         [](const auto& p) { return std::string(p.param); });

TEST_P(CommLocalForms, GiveTheReferenceBits) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (GetParam() == std::string("avx512") && !__builtin_cpu_supports("avx512bw")) GTEST_SKIP() << "no AVX-512 here";
  if (GetParam() == std::string("avx2") && !__builtin_cpu_supports("avx2")) GTEST_SKIP() << "no AVX2 here";
#endif
  Options options;
  options.set("isa", GetParam());
  for (int world : {1, 2}) {
    for (bool flush : {false, true}) {
      run_ranks(
          {"comm_local", true, world}, [&](Peer& peer, int rank) { return all_bit_patterns(peer, rank, flush); }, 1,
          &options);
    }
  }
}

TEST(CommLocalOptions, RefusesAnUnknownName) {
  Options options;
  options.set("isa", "avx1024");
  Peer peer({"comm_local", true, 1}, 0, fresh_job());
  EXPECT_EQ(expect_error(peer.open(&options), STRATA_INVALID_ARGUMENT, {"avx1024", "auto, scalar, avx2 or avx512"}),
            "");
}

}  // namespace
}  // namespace strata::test

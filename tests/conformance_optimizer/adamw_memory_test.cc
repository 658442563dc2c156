// adamw_memory_test.cc - which memory is touched: nothing outside the slice (guard pages), the gradient's own memory
// as the new weight, nothing at all when the update is skipped.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/conformance_optimizer/adamw_fixture.h"

namespace strata::test {
namespace {

const strata_optim_group plain = group(1e-3, 0.9, 0.999, 1e-8, 0.1);

// Pages between two that may not be touched.
class Fenced {
 public:
  Fenced() : page_(static_cast<uint64_t>(sysconf(_SC_PAGESIZE))) {
    base_ = static_cast<char*>(mmap(nullptr, 4 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_NE(base_, MAP_FAILED);
    mprotect(base_, page_, PROT_NONE);
    mprotect(base_ + 3 * page_, page_, PROT_NONE);
  }
  ~Fenced() { munmap(base_, 4 * page_); }
  Fenced(const Fenced&) = delete;
  char* place(uint64_t bytes, bool at_end) { return at_end ? base_ + 3 * page_ - bytes : base_ + page_; }

 private:
  uint64_t page_;
  char* base_;
};

std::vector<uint64_t> short_lengths() {
  std::vector<uint64_t> all = {1023, 1024, 1025};
  for (uint64_t n = 1; n <= 67; ++n) all.push_back(n);
  return all;
}

// cases.md 15: every length at both ends of mapped memory, every kind, every instruction set; values are those of the
// same elements in the middle of ordinary memory.
TEST(AdamwMemory, NothingOutsideTheSliceIsTouched) {
  Fenced fences[5];
  for (const Kind& kind : all_kinds()) {
    for (const std::string& isa : isas()) {
      Adamw adamw(options_for(kind, isa));
      const auto scalars = adamw.scalars(plain, 2);
      for (const uint64_t n : short_lengths()) {
        Data want(kind, n);
        fill_ordinary(want, static_cast<uint32_t>(n));
        Data start(kind, n);
        start.assign(want);
        adamw.step(want, scalars);
        for (const bool at_end : {false, true}) {
          char* weight = fences[0].place(start.weight.bytes(), at_end);
          char* grad = fences[1].place(start.grad.bytes(), at_end);
          std::memcpy(weight, start.weight.data(), start.weight.bytes());
          std::memcpy(grad, start.grad.data(), start.grad.bytes());
          std::vector<void*> state;
          for (size_t k = 0; k < start.state.size(); ++k) {
            state.push_back(fences[2 + k].place(start.state[k].bytes(), at_end));
            std::memcpy(state[k], start.state[k].data(), start.state[k].bytes());
          }
          strata_optim_args a = adamw.args(start, scalars);
          a.weight = weight;
          a.grad = grad;
          a.state = state.data();
          ASSERT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK);
          ASSERT_EQ(std::memcmp(weight, want.weight.data(), want.weight.bytes()), 0) << name(kind) << isa << n;
          for (size_t k = 0; k < state.size(); ++k) {
            ASSERT_EQ(std::memcmp(state[k], want.state[k].data(), want.state[k].bytes()), 0) << name(kind) << isa << n;
          }
        }
      }
    }
  }
}

TEST(AdamwMemory, WeightMayReplaceTheGradientItCameFrom) {
  for (const strata_dtype dtype : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
    const Kind kind = {dtype, dtype, false};
    for (const std::string& isa : isas()) {
      for (const uint64_t n : {uint64_t{1}, uint64_t{1'000}, uint64_t{1'100'003}}) {
        Adamw adamw(options_for(kind, isa));
        Data apart(kind, n, 1), same(kind, n, 1);
        fill_ordinary(apart, 4);
        same.assign(apart);
        same.weight.assign(same.grad.copy());
        const auto scalars = adamw.scalars(plain, 2);
        adamw.step(apart, scalars);
        strata_optim_args a = adamw.args(same, scalars);
        a.grad = a.weight;
        ASSERT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK) << take_failure(STRATA_INTERNAL).text();
        ASSERT_TRUE(apart.bytes() == same.bytes()) << name(kind) << ", " << isa << ", " << n;
      }
    }
  }
}

TEST(AdamwMemory, ASkippedUpdateChangesNothing) {
  for (const Kind& kind : all_kinds()) {
    Adamw adamw(options_for(kind));
    Data data(kind, 10'000);
    fill_any_bits(data, 17);
    const auto before = data.bytes();
    const auto scalars = adamw.scalars(plain, 2);
    strata_optim_args a = adamw.args(data, scalars);
    uint32_t apply = 0;
    a.apply = &apply;
    EXPECT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK);
    EXPECT_EQ(data.bytes(), before) << name(kind);
    apply = 1;
    EXPECT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK);
    EXPECT_NE(data.bytes(), before) << name(kind);
  }
}

TEST(AdamwMemory, ExportAndImportTouchOnlyTheirSpan) {
  for (const Kind& kind : all_kinds()) {
    Adamw adamw(options_for(kind));
    Data data(kind, 500);
    fill_ordinary(data, 12);
    for (uint32_t array = 0; array < 3; ++array) {
      const auto all = adamw.canonical(data, array);
      const std::vector<strata_optim_span> middle = {{100, 50, 0, 0}};
      strata_optim_args a = adamw.args(data, {}, middle);
      std::vector<float> part(52, 7.0f);
      ASSERT_EQ(adamw.api->export_array(adamw.self, &a, array, part.data() + 1), STRATA_OK);
      EXPECT_EQ(part.front(), 7.0f);
      EXPECT_EQ(part.back(), 7.0f);
      EXPECT_EQ(std::memcmp(part.data() + 1, all.data() + 100, 50 * sizeof(float)), 0);
      std::vector<float> changed = all;
      for (int i = 0; i < 50; ++i) changed[100 + i] = part[1 + i] = 0.25f * static_cast<float>(i);
      a = adamw.args(data, {}, middle);
      ASSERT_EQ(adamw.api->import_array(adamw.self, &a, array, part.data() + 1), STRATA_OK);
      EXPECT_EQ(bits(adamw.canonical(data, array)), bits(changed)) << name(kind) << ", array " << array;
    }
  }
}

}  // namespace
}  // namespace strata::test

// seen_memory.h - a copy of offload_cpu (tests/train/CMakeLists.txt) whose memory a test can reach: every region of
// every rank of this process.
#pragma once

#include <cstdint>

namespace strata::test {

using EachPiece = void (*)(void* ctx, char* at, uint64_t bytes);
using ForEachPiece = void (*)(void* ctx, EachPiece each);

}  // namespace strata::test

// Of the copy; by dlsym.
extern "C" void strata_test_for_each_piece(void* ctx, strata::test::EachPiece each);

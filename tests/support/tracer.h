// tracer.h - a child process whose calls that change files are counted, and one of them is its last, or fails.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#if defined(__SANITIZE_THREAD__)
#define SKIP_WITHOUT_FORK() GTEST_SKIP() << "the thread sanitizer cannot start threads after a fork"
#else
#define SKIP_WITHOUT_FORK() (void)0
#endif
#define SKIP_WITHOUT_TRACING() \
  SKIP_WITHOUT_FORK();         \
  if (!can_trace()) GTEST_SKIP() << "ptrace is not allowed here"

namespace strata::test {

bool can_trace();
// Whether calls of a child can be made to fail: it takes writing its registers, which is done here for x86-64.
bool can_fail_calls();

struct Strike {
  int call = 0;               // the number of the call that is struck, before the kernel carries it out; 0: none
  bool kill = true;           // else it fails with EIO
  bool can_exchange = true;   // false: renameat2 refuses RENAME_EXCHANGE, as many network file systems do
  bool only_renames = false;  // no other calls are counted: where threads make the others in any order
  std::function<void()> meanwhile = nullptr;  // happens while the child waits there; it is neither killed nor failed
  bool full_disk = false;                     // from that call on all that take space fail with ENOSPC, instead
};
struct Struck {
  bool killed = false;
  bool succeeded = false;  // the body returned 0
  int calls = 0;           // there were
};
// Runs `body` in a traced child, which then ends as programs do: what libraries do at exit is part of it.
Struck run_traced(const Strike& strike, int (*body)(const std::string&), const std::string& root);

}  // namespace strata::test

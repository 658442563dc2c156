#include "tests/support/tracer.h"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

namespace strata::test {
namespace {

bool is_rename(uint64_t nr) {
#ifdef SYS_rename
  if (nr == SYS_rename) return true;
#endif
  return nr == SYS_renameat2;
}

bool changes_files(uint64_t nr) {
  static const std::set<uint64_t> numbers = {
      SYS_openat,    SYS_mkdirat,   SYS_write,     SYS_pwrite64, SYS_fsync, SYS_fdatasync,
      SYS_ftruncate, SYS_fallocate, SYS_renameat2, SYS_unlinkat,
#ifdef SYS_rename
      SYS_open,      SYS_mkdir,     SYS_rename,    SYS_unlink,   SYS_rmdir, SYS_creat,
#endif
  };
  return numbers.count(nr) > 0;
}

bool takes_space(uint64_t nr) {
#ifdef SYS_mkdir
  if (nr == SYS_mkdir) return true;
#endif
  return nr == SYS_write || nr == SYS_pwrite64 || nr == SYS_fallocate || nr == SYS_mkdirat;
}

#if defined(__x86_64__)
// At its entry: the kernel will know no such call. At its exit: what it returns.
void skip_call(pid_t who) { ::ptrace(PTRACE_POKEUSER, who, offsetof(user_regs_struct, orig_rax), -1L); }
void return_error(pid_t who, long error) { ::ptrace(PTRACE_POKEUSER, who, offsetof(user_regs_struct, rax), -error); }
#else
void skip_call(pid_t) {}
void return_error(pid_t, long) {}
#endif

class Tracer {
 public:
  Tracer(const Strike& strike, pid_t child) : strike_(strike), child_(child) {}

  Struck run() {
    int status = 0;
    ::waitpid(child_, &status, 0);
    if (!WIFSTOPPED(status)) return struck_;
    ::ptrace(PTRACE_SETOPTIONS, child_, nullptr, PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_EXITKILL);
    ::ptrace(PTRACE_SYSCALL, child_, nullptr, nullptr);
    while (true) {
      const pid_t who = ::waitpid(-1, &status, __WALL);
      if (who < 0) return struck_;
      if (WIFEXITED(status) || WIFSIGNALED(status)) {
        if (who != child_) continue;
        struck_.succeeded = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        EXPECT_TRUE(struck_.killed || WIFEXITED(status)) << "the saver crashed";
        return struck_;
      }
      int signal = 0;
      if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
        at_call(who);
      } else if (WSTOPSIG(status) != SIGTRAP && WSTOPSIG(status) != SIGSTOP) {
        signal = WSTOPSIG(status);
      }
      ::ptrace(PTRACE_SYSCALL, who, nullptr, signal);
    }
  }

 private:
  void at_call(pid_t who) {
    struct __ptrace_syscall_info info {};
    ::ptrace(PTRACE_GET_SYSCALL_INFO, who, sizeof(info), &info);
    if (info.op == PTRACE_SYSCALL_INFO_EXIT && failing_.count(who)) {
      return_error(who, failing_[who]);
      failing_.erase(who);
    }
    if (info.op != PTRACE_SYSCALL_INFO_ENTRY) return;
    if (!(strike_.only_renames ? is_rename(info.entry.nr) : changes_files(info.entry.nr))) return;
    const bool struck = ++struck_.calls == strike_.call;
    if (strike_.full_disk) {
      if (strike_.call > 0 && struck_.calls >= strike_.call && takes_space(info.entry.nr)) fail(who, ENOSPC);
    } else if (struck && strike_.meanwhile) {
      strike_.meanwhile();
    } else if (struck && strike_.kill) {
      ::kill(child_, SIGKILL);
      struck_.killed = true;
    } else if (struck) {
      fail(who, EIO);
    } else if (!strike_.can_exchange && info.entry.nr == SYS_renameat2 && info.entry.args[4] == RENAME_EXCHANGE) {
      fail(who, EINVAL);
    }
  }
  void fail(pid_t who, int error) {
    skip_call(who);
    failing_[who] = error;
  }

  const Strike strike_;
  const pid_t child_;
  Struck struck_;
  std::map<pid_t, int> failing_;
};

}  // namespace

bool can_trace() {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0 ? 0 : 77);
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

bool can_fail_calls() {
#if defined(__x86_64__)
  return true;
#else
  return false;
#endif
}

Struck run_traced(const Strike& strike, int (*body)(const std::string&), const std::string& root) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(77);
    ::raise(SIGSTOP);
    std::exit(body(root));
  }
  return Tracer(strike, child).run();
}

}  // namespace strata::test

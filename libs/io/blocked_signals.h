// blocked_signals.h - signals are for the host's threads: new threads inherit the mask of the one that makes them.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace strata::io {

class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace strata::io

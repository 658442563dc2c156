#include "ranks.h"

#include <gtest/gtest.h>

#include <thread>

namespace strata::test {

namespace {

std::string open_and_run(const Setup& setup, int rank, const std::string& job, const RankBody& body,
                         unsigned host_threads, Options* options) {
  Peer peer(setup, rank, job, host_threads);
  RETURN_IF_BAD(expect_ok(peer.open(options)));
  return body(peer, rank);
}

}  // namespace

void run_ranks(const Setup& setup, const RankBody& body, unsigned host_threads, Options* options) {
  const std::string job = fresh_job();
  std::vector<std::string> results(static_cast<size_t>(setup.world));
  if (options) (void)options->c();  // builds the list once, before threads share it
  load<strata_collective_api>(setup.plugin, STRATA_COLLECTIVE);
  if (setup.threads) {
    std::vector<std::thread> threads;
    for (int r = 0; r < setup.world; ++r) {
      threads.emplace_back([&, r] {
        Options own = options ? *options : Options();
        results[static_cast<size_t>(r)] = open_and_run(setup, r, job, body, host_threads, options ? &own : nullptr);
      });
    }
    for (std::thread& thread : threads) thread.join();
  } else {
    Processes processes;
    for (int r = 0; r < setup.world; ++r) {
      processes.start([&, r](Processes&) { return open_and_run(setup, r, job, body, host_threads, options); });
    }
    for (int r = 0; r < setup.world; ++r) results[static_cast<size_t>(r)] = processes.line(r);
  }
  for (int r = 0; r < setup.world; ++r) EXPECT_EQ(results[static_cast<size_t>(r)], "") << "rank " << r;
}

}  // namespace strata::test

// mpi_ranks.cc - the interface of conformance_collective/ranks.h where mpirun has started the ranks: this process is
// one of them, and runs only its own body. Every rank runs the same tests in the same order.
#include "mpi_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

namespace strata::test {

namespace {
int number(const char* name, int fallback) {
  const char* text = std::getenv(name);
  return text ? std::atoi(text) : fallback;
}
}  // namespace

int mpi_rank() { return number("OMPI_COMM_WORLD_RANK", 0); }
int mpi_world() { return number("OMPI_COMM_WORLD_SIZE", 1); }

// One setup whatever the test asks for: the number of ranks is mpirun's.
std::vector<Setup> all_setups(const std::vector<int>&) { return {{"comm_mpi", false, mpi_world()}}; }

std::string fresh_job() {
  static int number = 0;
  return "mpi_test." + std::to_string(++number);
}

void run_ranks(const Setup& setup, const RankBody& body, unsigned host_threads, Options* options) {
  const std::string job = fresh_job();
  if (setup.plugin != "comm_mpi") GTEST_SKIP() << setup.plugin << " is tested elsewhere";
  Peer peer(setup, mpi_rank(), job, host_threads);
  std::string result = expect_ok(peer.open(options));
  if (result.empty()) result = body(peer, mpi_rank());
  EXPECT_EQ(result, "") << "rank " << mpi_rank();
}

// Only what the linker asks for: tests of forked ranks are not for this launcher.
Processes::~Processes() {}
int Processes::start(const Body&) { std::abort(); }
void Processes::say(const std::string&) { std::abort(); }
std::string Processes::line(int) { std::abort(); }
void Processes::signal(int, int) { std::abort(); }

}  // namespace strata::test

#include "ranks.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

namespace strata::test {

std::ostream& operator<<(std::ostream& out, const Setup& setup) { return out << setup_name(setup); }

std::string setup_name(const Setup& setup) {
  return setup.plugin + (setup.threads ? "_threads_" : "_processes_") + std::to_string(setup.world);
}

std::vector<Setup> all_setups(const std::vector<int>& worlds) {
  std::vector<Setup> setups;
  for (const char* plugin : {"comm_local"}) {
    for (bool threads : {true, false}) {
      for (int world : worlds) setups.push_back({plugin, threads, world});
    }
  }
  return setups;
}

std::string fresh_job() {
  static std::atomic<int> number{0};
  return "test." + std::to_string(getpid()) + "." + std::to_string(++number);
}

// ---- Peer ----

Peer::Peer(const Setup& setup, int rank_number, const std::string& job, unsigned host_threads)
    : api(load<strata_collective_api>(setup.plugin, STRATA_COLLECTIVE)),
      rank(rank_number, setup.world, setup.threads, job),
      host([](strata_log_level, const std::string&, const std::string&) {}, STRATA_LOG_INFO, host_threads) {
  base = rank.args();
  base.host = host.c();
  base.job = rank.job.c_str();
  base.deadline_ns = 20'000'000'000;
}

Status Peer::open(Options* options) {
  strata_open_args a = base;
  a.options = options ? options->c() : nullptr;
  return open_with(a);
}

Status Peer::open_with(strata_open_args a) { return take_failure(api->open(&a, &comm)); }

void Peer::close() {
  if (comm) api->close(comm);
  comm = nullptr;
}

void* Peer::alloc(uint64_t bytes) {
  void* out = nullptr;
  if (Status s = take_failure(api->alloc(comm, bytes, &out)); !s.ok()) {
    std::fprintf(stderr, "alloc: %s\n", s.text().c_str());
    std::abort();
  }
  return out;
}

strata_coll_args Peer::args(const std::vector<strata_coll_item>& items, uint64_t tag, const char* label) const {
  strata_coll_args a{};
  a.struct_size = sizeof(a);
  a.items = items.data();
  a.item_count = items.size();
  a.item_stride = sizeof(strata_coll_item);
  a.tag = tag;
  a.label = label;
  a.deadline_ns = -1;
  return a;
}

Status Peer::call(Slot slot, const std::vector<strata_coll_item>& items, uint64_t tag, const char* label) {
  const strata_coll_args a = args(items, tag, label);
  return take_failure(slot(comm, &a, nullptr));
}

Status Peer::barrier(const char* label, int64_t deadline_ns) {
  strata_coll_args a = args({}, 0, label);
  a.deadline_ns = deadline_ns;
  return take_failure(api->barrier(comm, &a));
}

strata_coll_item item(const void* in, void* out, uint64_t count, strata_dtype in_dtype, strata_dtype out_dtype) {
  return {sizeof(strata_coll_item), STRATA_ABI_MINOR, in, out, count, in_dtype, out_dtype};
}

// ---- Processes ----

Processes::~Processes() {
  for (size_t i = 0; i < children_.size(); ++i) {
    if (!children_[i].reaped) {
      signal(static_cast<int>(i), SIGKILL);
      reap(static_cast<int>(i));
    }
    ::close(children_[i].pipe);
  }
}

int Processes::start(const Body& body) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
  const pid_t pid = ::fork();
  if (pid == 0) {
    for (Child& other : children_) ::close(other.pipe);
    children_.clear();
    ::close(ends[0]);
    out_ = ends[1];
    std::string result;
    try {
      result = body(*this);
    } catch (const std::exception& e) {
      result = e.what();
    }
    say(result);
    ::_exit(0);
  }
  ::close(ends[1]);
  children_.push_back({pid, ends[0], "", false});
  return static_cast<int>(children_.size()) - 1;
}

void Processes::say(const std::string& line) {
  const std::string text = line + "\n";
  if (::write(out_, text.data(), text.size()) != static_cast<ssize_t>(text.size())) ::_exit(3);
}

std::string Processes::line(int index) {
  Child& child = children_[static_cast<size_t>(index)];
  for (;;) {
    if (const size_t end = child.buffer.find('\n'); end != std::string::npos) {
      const std::string line = child.buffer.substr(0, end);
      child.buffer.erase(0, end + 1);
      return line;
    }
    pollfd one = {child.pipe, POLLIN, 0};
    if (::poll(&one, 1, 30'000) <= 0) return "<nothing in 30 s>";
    char bytes[4096];
    const ssize_t got = ::read(child.pipe, bytes, sizeof(bytes));
    if (got <= 0) return "<ended>";
    child.buffer.append(bytes, static_cast<size_t>(got));
  }
}

void Processes::signal(int index, int number) { ::kill(children_[static_cast<size_t>(index)].pid, number); }

void Processes::reap(int index) {
  Child& child = children_[static_cast<size_t>(index)];
  if (!child.reaped) ::waitpid(child.pid, nullptr, 0);
  child.reaped = true;
}

// ---- running all ranks ----

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

std::string expect_ok(const Status& status) {
  return status.ok() ? "" : std::string("unexpected ") + status_name(status.code()) + ": " + status.text();
}

std::string expect_error(const Status& status, strata_status code, const std::vector<std::string>& parts) {
  const std::string got = std::string(status_name(status.code())) + ": " + status.text();
  if (status.code() != code) return "expected " + std::string(status_name(code)) + ", got " + got;
  for (const std::string& part : parts) {
    if (status.text().find(part) == std::string::npos) return "no \"" + part + "\" in " + got;
  }
  return "";
}

}  // namespace strata::test

// The trace: what the file says of a run against the run's counters, its ranges, its limits, and that it is not there
// when nobody asked. No test looks at how long anything took.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>

#include "tests/support/tracer.h"
#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

struct Span {
  std::string row, name, unit, label;
  double begin, end;
  uint64_t step, bytes;
};

struct File {
  std::vector<Span> spans;
  uint64_t dropped = 0;
  int rank = -1;
  std::vector<Span> named(const std::string& row, const std::string& name) const {
    std::vector<Span> found;
    for (const Span& s : spans) {
      if (s.row == row && s.name == name) found.push_back(s);
    }
    return found;
  }
  std::set<std::string> rows() const {
    std::set<std::string> all;
    for (const Span& s : spans) all.insert(s.row);
    return all;
  }
  std::set<uint64_t> steps() const {
    std::set<uint64_t> all;
    for (const Span& s : spans) all.insert(s.step);
    return all;
  }
};

File read(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  const nlohmann::json json = nlohmann::json::parse(text.str());  // throws
  File file;
  file.dropped = json.at("otherData").at("dropped");
  file.rank = json.at("otherData").at("rank");
  std::map<int, std::string> rows;
  for (const auto& event : json.at("traceEvents")) {
    EXPECT_EQ(event.at("pid"), file.rank);
    if (event.at("name") == "thread_name") rows[event.at("tid")] = event.at("args").at("name");
    if (event.at("ph") != "X") continue;
    const auto& args = event.at("args");
    const double begin = event.at("ts"), length = event.at("dur");
    file.spans.push_back({rows.at(event.at("tid")), event.at("name"), args.value("unit", ""), args.value("label", ""),
                          begin, begin + length, args.at("step"), args.value("bytes", uint64_t{0})});
  }
  EXPECT_EQ(file.spans.size(), json.at("otherData").at("spans"));
  return file;
}

// A directory of its own, gone with the test.
struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "strata-trace-XXXXXX").string();
    path = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file(int rank, const std::string& again = "") const {
    return (path / "trace" / ("rank" + std::to_string(rank) + again + ".json")).string();
  }
  std::vector<std::string> settings() const { return {"trace.path=" + (path / "trace").string()}; }
};

// Spans of a row lie in each other or beside each other. Times have three decimals of a microsecond.
void expect_nested(const File& file) {
  std::map<std::string, std::vector<Span>> rows;
  for (const Span& s : file.spans) rows[s.row].push_back(s);
  for (auto& [row, spans] : rows) {
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.begin != b.begin ? a.begin < b.begin : a.end > b.end; });
    std::vector<Span> open;
    for (const Span& s : spans) {
      ASSERT_LE(s.begin, s.end) << row << " " << s.name;
      while (!open.empty() && open.back().end <= s.begin + 5e-4) open.pop_back();
      if (!open.empty()) {
        EXPECT_LE(s.end, open.back().end + 5e-4) << row << ": " << s.name << " in " << open.back().name;
      }
      open.push_back(s);
    }
  }
}

uint64_t bytes_of(const std::vector<Span>& spans) {
  uint64_t bytes = 0;
  for (const Span& s : spans) bytes += s.bytes;
  return bytes;
}

// Everything that is gathered or reduced in a run from its first step to its last is in the trace, byte by byte.
void expect_counted(const File& file, const strata_counters& c, bool device) {
  auto both = [&](const std::string& name) { return file.named("collective", name); };
  EXPECT_EQ(both("gather").size(), c.gather_calls);
  EXPECT_EQ(bytes_of(both("gather")), c.gather_bytes);
  EXPECT_EQ(both("reduce").size() + both("all-reduce").size(), c.reduce_calls);
  EXPECT_EQ(bytes_of(both("reduce")) + bytes_of(both("all-reduce")), c.reduce_bytes);
  if (!device) return;
  EXPECT_EQ(file.named("gathers", "gather").size(), c.gather_calls);
  EXPECT_EQ(bytes_of(file.named("gathers", "gather")), c.gather_bytes);
  EXPECT_EQ(file.named("reductions", "reduce").size() + file.named("reductions", "all-reduce").size(), c.reduce_calls);
}

Trial traced(const Folder& folder, int world, int stage) {
  Trial t;
  t.world = world;
  t.stage = stage;
  t.overrides = folder.settings();
  if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=100");
  return t;
}

TEST(Trace, HoldsEveryCollectiveWithItsBytes) {
  for (int world : {1, 2}) {
    for (int stage : {0, 2, 3}) {
      SCOPED_TRACE("world " + std::to_string(world) + " stage " + std::to_string(stage));
      const Folder folder;
      const Result r = run(traced(folder, world, stage));
      ASSERT_EQ(r.error, "");
      const File file = read(folder.file(0));
      EXPECT_EQ(file.dropped, 0u);
      EXPECT_EQ(file.rows(), (std::set<std::string>{"host", "collective", "update"}));
      expect_counted(file, r.counters, false);
      expect_nested(file);
      EXPECT_EQ(file.named("host", "forward").size(), 4u);
      EXPECT_EQ(file.named("host", "backward").size(), 4u);
      EXPECT_EQ(file.named("host", "step").size(), 4u);
      EXPECT_EQ(file.named("update", "updates").size(), 4u);
      EXPECT_FALSE(file.named("update", "update").empty());
      EXPECT_EQ(std::filesystem::exists(folder.file(1)), world == 2);
      if (world == 2) {
        EXPECT_EQ(read(folder.file(1)).rank, 1);
      }
    }
  }
}

TEST(Trace, DeviceStreamsHaveRowsOfTheirOwn) {
  for (const std::string offload : {"none", "cpu"}) {
    SCOPED_TRACE(offload);
    const Folder folder;
    Trial t = traced(folder, 2, 3);
    t.gpu = "gpu_sim";
    t.gpu_delay_us = 50;
    t.offload_optimizer = offload;
    const Result r = run(t);
    ASSERT_EQ(r.error, "");
    const File file = read(folder.file(0));
    EXPECT_EQ(file.dropped, 0u);
    expect_counted(file, r.counters, true);
    expect_nested(file);
    std::set<std::string> rows = {"host", "collective", "update", "gathers", "reductions", "completing"};
    for (const char* row : {"streaming", "updates"}) {
      if (offload == "none") rows.insert(row);
    }
    if (offload == "cpu") rows.insert("weights");
    EXPECT_EQ(file.rows(), rows);
    EXPECT_EQ(file.named("updates", "update").empty(), offload == "cpu") << "where the update runs";
    EXPECT_EQ(file.named("weights", "to tier").empty(), offload == "none") << "new weights go to the device";
    // Work of the device is done no earlier than the thread enqueued it.
    const auto enqueued = file.named("collective", "gather"), done = file.named("gathers", "gather");
    ASSERT_EQ(enqueued.size(), done.size());
    for (size_t i = 0; i < done.size(); ++i) {
      EXPECT_EQ(done[i].unit, enqueued[i].unit);
      EXPECT_GE(done[i].end, enqueued[i].begin);
    }
  }
}

// Everything that leaves for sums in host memory is added there, byte by byte, in the step it is of.
TEST(Trace, SumsInHostMemoryHaveARow) {
  for (const int world : {1, 2}) {
    const Folder folder;
    Trial t = traced(folder, world, 2);
    t.gpu = "gpu_sim";
    t.offload_optimizer = "cpu";
    t.micro_batches = 2;
    const Result r = run(t);
    ASSERT_EQ(r.error, "");
    const File file = read(folder.file(0));
    expect_nested(file);
    const auto added = file.named("gradient sums", "add");
    EXPECT_EQ(bytes_of(added), r.counters.tier_write[1]);
    EXPECT_EQ(file.named("gradient sums", "wait for copy").size(), added.size());
    std::map<uint64_t, uint64_t> of_step;
    for (const Span& s : added) of_step[s.step] += s.bytes;
    ASSERT_EQ(of_step.size(), 4u);
    for (const auto& [step, bytes] : of_step) EXPECT_EQ(bytes, bytes_of(added) / 4) << step;
  }
}

TEST(Trace, WaitsAreNamed) {
  const Folder folder;
  Trial t = traced(folder, 2, 3);
  t.steps = 8;
  t.overrides.push_back("zero_optimization.prefetch_bucket_size=0");
  ASSERT_EQ(run(t).error, "");
  const File file = read(folder.file(0));
  EXPECT_FALSE(file.named("collective", "wait for ranks").empty());
  EXPECT_FALSE(file.named("host", "wait for gather").empty());
  for (const Span& s : file.named("host", "wait for gather")) EXPECT_NE(s.unit, "");
}

TEST(Trace, NumbersOfARunAreTheSameWithIt) {
  const Folder folder;
  Trial off = traced(folder, 2, 3), on = off;
  off.overrides = {off.overrides.back()};
  EXPECT_TRUE(run(off) == run(on));
}

TEST(Trace, OffThereIsNoFile) {
  const Folder folder;
  Trial t;
  t.stage = 3;
  const Result r = run(t);
  ASSERT_EQ(r.error, "");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path));
}

TEST(Trace, ARangeIsWrittenWhileTheRunGoesOn) {
  const Folder folder;
  Trial t = traced(folder, 2, 3);
  for (const char* range : {"trace.first_step=2", "trace.steps=2"}) t.overrides.push_back(range);
  std::vector<std::atomic<bool>> there(2);
  run_body(t, [&](int rank, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    for (int step = 1; step <= 5; ++step) {
      ASSERT_EQ(micro_batch(e, m, step, 0, rank, UINT32_MAX), "");
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    }
    for (int i = 0; i < 5000 && !std::filesystem::exists(folder.file(rank)); ++i) usleep(1000);
    there[static_cast<size_t>(rank)] = std::filesystem::exists(folder.file(rank));
  });
  for (int rank : {0, 1}) {
    EXPECT_TRUE(there[static_cast<size_t>(rank)]) << "written before the close";
    const File file = read(folder.file(rank));
    EXPECT_EQ(file.steps(), (std::set<uint64_t>{2, 3}));
    EXPECT_EQ(file.named("update", "updates").size(), 2u) << "the last update of the range is in it";
    expect_nested(file);
  }
}

TEST(Trace, OverflowKeepsTheNewestAndCountsTheRest) {
  const Folder folder;
  Trial t = traced(folder, 1, 3);
  t.overrides.push_back("trace.records=32");
  t.steps = 20;
  ASSERT_EQ(run(t).error, "");
  const File file = read(folder.file(0));
  EXPECT_GT(file.dropped, 100u);
  std::map<std::string, size_t> kept;
  for (const Span& s : file.spans) ++kept[s.row];
  for (const auto& [row, count] : kept) EXPECT_LE(count, 32u) << row;
  EXPECT_EQ(kept["host"], 32u);
  uint64_t newest = 0;
  for (const Span& s : file.spans) newest = std::max(newest, s.step);
  EXPECT_GE(newest, 20u);
  expect_nested(file);
}

// Log lines of one rank.
struct Log {
  std::mutex mutex;
  std::vector<std::pair<strata_log_level, std::string>> lines;
  static void STRATA_CALL take(void* ctx, strata_log_level level, const char*, const char* text) {
    auto* log = static_cast<Log*>(ctx);
    std::lock_guard lock(log->mutex);
    log->lines.emplace_back(level, text);
  }
  std::vector<std::string> with(const std::string& part, strata_log_level level) {
    std::lock_guard lock(mutex);
    std::vector<std::string> found;
    for (const auto& [l, text] : lines) {
      if (l == level && text.find(part) != std::string::npos) found.push_back(text);
    }
    return found;
  }
};

strata_engine* open_logged(const std::string& manifest, Log* log) {
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest_text = manifest.c_str();
  args.plugin_dir = STRATA_BUILD_PLUGIN_DIR;
  args.log = Log::take;
  args.log_ctx = log;
  strata_engine* e = nullptr;
  EXPECT_EQ(strata_open(&args, &e), STRATA_OK) << last();
  return e;
}

void steps(strata_engine* e, const Model& m, int count, strata_step_args* args = nullptr, int pause_ms = 0) {
  for (int step = 1; step <= count; ++step) {
    for (strata_unit u = 0; u < m.units.size(); ++u) {
      ASSERT_EQ(strata_fetch(e, u, nullptr), STRATA_OK) << last();
      give_gradient(e, m, u, 0.5f);
      ASSERT_EQ(strata_release(e, u, nullptr), STRATA_OK) << last();
    }
    ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
    std::this_thread::sleep_for(std::chrono::milliseconds(pause_ms));
    ASSERT_EQ(strata_step(e, args), STRATA_OK) << last();
  }
  ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
}

constexpr char kPlain[] =
    "train_micro_batch_size_per_gpu = 1\ngradient_accumulation_steps = 1\nthreads = 1\nsteps_per_print = 0\n";

std::string traced_to(const std::filesystem::path& path, const std::string& more = "") {
  return std::string(kPlain) + "[trace]\npath = \"" + path.string() + "\"\n" + more;
}

void write_file(const std::filesystem::path& path, const std::string& text) { std::ofstream(path) << text; }

TEST(Trace, APathThatCannotBeWrittenIsRefusedAtCommit) {
  const Folder folder;
  write_file(folder.path / "file", "");
  std::filesystem::create_directories(folder.path / "taken" / "rank0.json");
  const std::pair<std::string, std::string> cases[] = {{"file", "Not a directory"}, {"taken", "it is a folder"}};
  for (const auto& [path, why] : cases) {
    Log log;
    const std::string whole = (folder.path / path).string();
    strata_engine* e = open_logged(traced_to(whole), &log);
    const std::string error = build_model(e, vectors({100}));
    for (const std::string& part : {std::string("trace.path"), whole, why}) {
      EXPECT_NE(error.find(part), std::string::npos) << error;
    }
    strata_close(e);
    EXPECT_TRUE(log.with("trace", STRATA_LOG_WARN).empty()) << path;
    EXPECT_FALSE(std::filesystem::exists(folder.path / path / "rank0.json.part"));
  }
}

// Before anything else is done, on every rank, by the directory that is missing. What is there already is enough.
TEST(Trace, ADirectoryThatIsNotThereIsRefusedAtOpen) {
  const Folder folder;
  write_file(folder.path / "file", "");
  const std::string missing = (folder.path / "missing").string(), file = (folder.path / "file").string();
  for (const auto& [path, says] : {std::pair{missing + "/trace", missing + ": no such directory"},
                                   {missing + "/trace/", missing + ": no such directory"},
                                   {file + "/trace", file + ": is no directory"}}) {
    std::string errors[2];
    strata_status codes[2];
    std::vector<std::thread> ranks;
    for (int rank : {0, 1}) {
      ranks.emplace_back([&, rank, path = path] {
        const Trial t = {.world = 2, .overrides = {"trace.path=" + path}};
        strata_close(open_rank(t, "no-directory-for-a-trace" + path, rank, &errors[rank], nullptr, &codes[rank]));
      });
    }
    for (std::thread& rank : ranks) rank.join();
    for (int rank : {0, 1}) {
      EXPECT_EQ(codes[rank], STRATA_NOT_FOUND) << errors[rank];
      EXPECT_NE(errors[rank].find("trace.path"), std::string::npos) << errors[rank];
      EXPECT_NE(errors[rank].find(says), std::string::npos) << errors[rank];
    }
  }
  EXPECT_FALSE(std::filesystem::exists(missing));
}

TEST(Trace, ARankWithoutAFileStopsAllAtCommit) {
  const Folder folder;
  std::filesystem::create_directories(folder.file(1));
  run_body(traced(folder, 2, 2), [&](int rank, strata_engine* e) {
    const std::string error = build_model(e, odd_model());
    EXPECT_NE(error.find(rank == 1 ? folder.file(1) : "rank 1"), std::string::npos) << error;
  });
}

// The limit on the size of files stands for a disk that is full.
TEST(Trace, ADiskThatFillsUpIsOneWarningAndLeavesNothing) {
  const Folder folder;
  Log log;
  strata_engine* e = open_logged(traced_to(folder.path / "trace", "steps = 1\n"), &log);
  const Model m = vectors({100, 200});
  ASSERT_EQ(build_model(e, m), "");
  rlimit whole{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &whole), 0);
  rlimit small = whole;
  small.rlim_cur = 1000;
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  steps(e, m, 3);
  for (int i = 0; i < 5000 && log.with("trace", STRATA_LOG_WARN).empty(); ++i) usleep(1000);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path / "trace")) << "the disk is free again at once";
  strata_close(e);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &whole), 0);
  std::signal(SIGXFSZ, handler);
  const auto warnings = log.with("trace", STRATA_LOG_WARN);
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find(folder.file(0) + ".part: File too large"), std::string::npos) << warnings[0];
  EXPECT_TRUE(std::filesystem::is_empty(folder.path / "trace"));
}

// An engine whose unit has this name, trained for two steps.
strata_engine* trained(const Folder& folder, const std::string& unit, Log* log, const std::string& more = "") {
  strata_engine* e = open_logged(traced_to(folder.path / "trace", more), log);
  Model m = vectors({100});
  m.units[0] = unit;
  EXPECT_EQ(build_model(e, m), "");
  steps(e, m, 2);
  return e;
}

std::string unit_in(const std::string& path) {
  const auto fetches = read(path).named("host", "fetch");
  return fetches.empty() ? "" : fetches[0].unit;
}

TEST(Trace, EnginesAtOneTimeHaveFilesOfTheirOwn) {
  const Folder folder;
  Log log;
  strata_engine* first = trained(folder, "first", &log, "steps = 1\n");
  for (int i = 0; i < 5000 && !std::filesystem::exists(folder.file(0)); ++i) usleep(1000);
  // The first one's file is written, and stays its own; the second one's is not.
  strata_engine* second = trained(folder, "second", &log);
  EXPECT_EQ(log.with("this one's file is " + folder.file(0, ".2"), STRATA_LOG_INFO).size(), 1u);
  strata_engine* third = trained(folder, "third", &log);
  for (strata_engine* e : {second, first, third}) strata_close(e);
  EXPECT_EQ(unit_in(folder.file(0)), "first");
  EXPECT_EQ(unit_in(folder.file(0, ".2")), "second");
  EXPECT_EQ(unit_in(folder.file(0, ".3")), "third");
  for (const auto& entry : std::filesystem::directory_iterator(folder.path / "trace")) {
    EXPECT_EQ(entry.path().extension(), ".json") << entry.path();
  }
}

TEST(Trace, OtherProcessesHaveFilesOfTheirOwn) {
  SKIP_WITHOUT_FORK();
  const Folder folder;
  Log log;
  strata_engine* parent = trained(folder, "parent", &log);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    Log other;
    strata_close(trained(folder, "child", &other));
    _exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  strata_close(parent);
  EXPECT_EQ(unit_in(folder.file(0)), "parent");
  EXPECT_EQ(unit_in(folder.file(0, ".2")), "child");
}

TEST(Trace, FilesOfRunsThatAreOverAreReplaced) {
  const Folder folder;
  std::filesystem::create_directories(folder.path / "trace");
  write_file(folder.file(0), "of a run before");
  write_file(folder.file(0) + ".part", std::string(1 << 20, 'x'));  // of one that was killed
  Log log;
  strata_close(trained(folder, "now", &log));
  EXPECT_EQ(unit_in(folder.file(0)), "now");
  EXPECT_FALSE(std::filesystem::exists(folder.file(0) + ".part"));
  EXPECT_FALSE(std::filesystem::exists(folder.file(0, ".2")));
}

TEST(Trace, ARangeThatNeverBeganIsSaid) {
  const Folder folder;
  Log log;
  strata_engine* e = open_logged(
      std::string(kPlain) + "[trace]\npath = \"" + folder.path.string() + "/trace\"\nfirst_step = 100\n", &log);
  const Model m = vectors({100});
  ASSERT_EQ(build_model(e, m), "");
  steps(e, m, 2);
  strata_close(e);
  EXPECT_EQ(log.with("step 100", STRATA_LOG_WARN).size(), 1u);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path / "trace"));
}

TEST(Trace, NamesAreEscaped) {
  const Folder folder;
  Log log;
  strata_engine* e =
      open_logged(std::string(kPlain) + "[trace]\npath = \"" + folder.path.string() + "/trace\"\n", &log);
  Model m = vectors({100});
  m.units[0] = "a \"quoted\\\" unit\n\u00e9" + std::string(60, 'x') + "\u00e9";
  ASSERT_EQ(build_model(e, m), "");
  steps(e, m, 1);
  strata_close(e);
  const File file = read(folder.file(0));
  ASSERT_FALSE(file.named("host", "fetch").empty());
  EXPECT_EQ(file.named("host", "fetch")[0].unit, m.units[0]);
}

// ---- the line per steps_per_print --------------------------------------------------------------------------------

double number_after(const std::string& line, const std::string& word) {
  const size_t at = line.find(word);
  EXPECT_NE(at, std::string::npos) << word << " in " << line;
  return at == std::string::npos ? -1 : std::stod(line.substr(at + word.size()));
}

std::vector<std::string> lines_of(int every, int count, strata_step_args* args, const std::string& more = "") {
  Log log;
  std::string manifest(kPlain);
  manifest.replace(manifest.find("print = 0"), 9, "print = " + std::to_string(every));
  strata_engine* e = open_logged(manifest + more, &log);
  const Model m = vectors({1000, 3000});
  EXPECT_EQ(build_model(e, m), "");
  steps(e, m, count, args, 5);  // so long that the digits of a line tell its numbers
  strata_close(e);
  return log.with("grad norm", STRATA_LOG_INFO);
}

TEST(Progress, ALineHasTheNumbersOfTheRun) {
  strata_step_args args;
  STRATA_INIT(&args);
  args.lr = 0.25;
  args.loss = 1.5;
  args.tokens = 700;
  args.note = "and more";
  const auto lines = lines_of(2, 4, &args);
  ASSERT_EQ(lines.size(), 2u);
  for (const std::string& line : lines) {
    EXPECT_NEAR(number_after(line, "loss "), 1.5, 1e-6);
    EXPECT_NEAR(number_after(line, "grad norm "), 0.5 * std::sqrt(4000.0), 1e-3);
    EXPECT_EQ(number_after(line, ", lr "), 0.25);
    const double ms = number_after(line, "lr 0.25, "), rate = number_after(line, " ms, "),
                 tera = number_after(line, "tokens/s and ");
    EXPECT_NEAR(rate * ms / 1000, 700, 14) << line;
    EXPECT_NEAR(tera / (rate * 6 * 4000 * 1e-12), 1, 0.01) << line;
    EXPECT_NE(line.find("; and more"), std::string::npos) << line;
  }
  EXPECT_EQ(lines[0].find("step 2:"), 0u);
  EXPECT_EQ(lines[1].find("step 4:"), 0u);
}

TEST(Progress, WhatIsNotGivenIsLeftOut) {
  const auto lines = lines_of(1, 2, nullptr);
  ASSERT_EQ(lines.size(), 2u);
  for (const char* word : {"loss", "tokens/s", "FLOP"}) EXPECT_EQ(lines[0].find(word), std::string::npos) << lines[0];
}

// A note and numbers may be anything: the line stays one line that a terminal shows as it is.
TEST(Progress, WhateverHostsGiveStaysOnePrintableLine) {
  strata_step_args args;
  STRATA_INIT(&args);
  args.lr = 1e-3;
  const std::pair<std::string, std::string> notes[] = {
      {"two\nlines\r\t\x1b[31m %s %n {}", "; two\\nlines\\x0d\\x09\\x1b[31m %s %n {}"},
      {"bad \xff\xc3( \xe2\x82", "; bad \\xff\\xc3( \\xe2\\x82"},
      {"\u00e9\u2603 \u009b31m\u2028", "; \u00e9\u2603 \\xc2\\x9b31m\\xe2\\x80\\xa8"},
      {std::string(100000, 'x'), "; " + std::string(1000, 'x') + "..."},
      {"", ""}};
  for (const auto& [note, shown] : notes) {
    args.note = note.c_str();
    const auto lines = lines_of(1, 1, &args);
    ASSERT_EQ(lines.size(), 1u);
    EXPECT_TRUE(lines[0].ends_with(shown)) << lines[0].substr(lines[0].find("per step"));
    EXPECT_LT(lines[0].size(), 1600u);
  }
  args.note = nullptr;
  for (double loss : {std::nan(""), -1e308, 1e300, HUGE_VAL}) {
    for (uint64_t tokens : {uint64_t{1}, UINT64_MAX}) {
      args.loss = loss;
      args.tokens = tokens;
      const auto lines = lines_of(2, 2, &args);  // sums of tokens, too
      ASSERT_EQ(lines.size(), 1u);
      EXPECT_LT(lines[0].size(), 500u) << lines[0];
      const double shown = number_after(lines[0], "loss ");
      EXPECT_TRUE(std::isnan(loss) ? std::isnan(shown) : shown == loss) << lines[0];
      if (tokens > 1) {
        EXPECT_GT(number_after(lines[0], " ms, "), 1e19) << lines[0];
      }
    }
  }
}

TEST(Progress, AShorterStructOfAnOlderHostWorks) {
  strata_step_args args;
  STRATA_INIT(&args);
  args.lr = std::nan("");
  args.loss = 7;
  args.struct_size = offsetof(strata_step_args, loss);
  const auto lines = lines_of(1, 1, &args);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0].find("loss"), std::string::npos);
}

TEST(Progress, NoLinesWhenNoneAreAskedFor) {
  EXPECT_TRUE(lines_of(0, 3, nullptr).empty());
  EXPECT_TRUE(lines_of(1, 3, nullptr, "log_level = \"warn\"\n").empty());
}

}  // namespace
}  // namespace strata::test

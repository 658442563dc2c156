// The control channel by itself: 2 to 4 ranks, as threads and as processes, over the machine's socket and over TCP. Who
// never comes, comes twice, differs, dies, stops, leaves or gives up is named on every rank.
//
// Deadlines are long where an error must come without them, so that a test which waits for one fails by its own limit.
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>

#include <thread>

#include "control_channel/channel.h"
#include "rank_env/rank_env.h"
#include "ranks.h"

namespace strata::test {
namespace {

using collective_kit::Op;
using control_channel::Address;
using control_channel::Channel;
using control_channel::Place;
using control_channel::Post;
using plugin_kit::Deadline;
using plugin_kit::Error;

constexpr std::chrono::seconds kLong{20};

// A port that was free a moment ago.
std::string free_port() {
  io::Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address));
  socklen_t length = sizeof(address);
  ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length);
  return "127.0.0.1:" + std::to_string(ntohs(address.sin_port));
}

struct Meeting {
  explicit Meeting(bool tcp) : job(fresh_job()) {
    if (tcp) {
      EXPECT_TRUE(control_channel::resolve(free_port(), &address).ok());
    } else {
      address = control_channel::local_address("test", job);
    }
  }
  Place place(int rank, int world) const { return {rank, world, job, address}; }
  std::string job;
  Address address;
};

Post post(uint64_t number, Op op = Op::kAllGather, uint64_t bytes = 64, const char* label = "gather layer3") {
  Post p{};
  p.call = number;
  p.op = op;
  p.bytes = bytes;
  p.items = 1;
  p.tag = 7;
  std::strncpy(p.label, label, sizeof(p.label) - 1);
  return p;
}

std::string text_of(const Error& e) { return e.ok() ? "" : std::string(status_name(e.code())) + ": " + e.text(); }

// Waits until the channel knows of a failure.
std::string ending(const Channel& channel) {
  for (int k = 0; k < 2'000 && channel.failure().ok(); ++k) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return text_of(channel.failure());
}

std::string needs(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) return "no \"" + part + "\" in " + (text.empty() ? "success" : text);
  }
  return "";
}

using Body = std::function<std::string(Channel& channel, int rank)>;

std::string join_and_run(const Place& place, const Body& body, std::chrono::nanoseconds silence = kLong) {
  Channel channel(place, {});
  if (Error e = channel.open(Deadline(kLong), silence); !e.ok()) return text_of(e);
  return body(channel, place.rank);
}

struct Way {
  bool threads, tcp;
  int world;
};

class ControlChannel : public testing::TestWithParam<Way> {
 protected:
  void run(const Body& body) const {
    const Way way = GetParam();
    const Meeting meeting(way.tcp);
    std::vector<std::string> results(static_cast<size_t>(way.world), "not run");
    if (way.threads) {
      std::vector<std::thread> threads;
      for (int r = 0; r < way.world; ++r) {
        threads.emplace_back(
            [&, r] { results[static_cast<size_t>(r)] = join_and_run(meeting.place(r, way.world), body); });
      }
      for (std::thread& t : threads) t.join();
    } else {
      Processes ranks;
      for (int r = 0; r < way.world; ++r) {
        ranks.start([&, r](Processes&) { return join_and_run(meeting.place(r, way.world), body); });
      }
      for (int r = 0; r < way.world; ++r) results[static_cast<size_t>(r)] = ranks.line(r);
    }
    for (int r = 0; r < way.world; ++r) EXPECT_EQ(results[static_cast<size_t>(r)], "") << "rank " << r;
  }
  int world() const { return GetParam().world; }
};

INSTANTIATE_TEST_SUITE_P(All, ControlChannel,
                         testing::Values(Way{true, false, 1}, Way{true, false, 3}, Way{true, true, 2},
                                         Way{false, false, 4}, Way{false, true, 3}),
                         [](const auto& p) {
                           return std::string(p.param.threads ? "threads_" : "processes_") +
                                  (p.param.tcp ? "tcp_" : "local_") + std::to_string(p.param.world);
                         });

// The last two ranks meet again as a part, at a door that one of them opened, in the other order.
TEST_P(ControlChannel, APartMeetsAtADoorAndFailsWithTheWhole) {
  if (world() < 3) GTEST_SKIP() << "no rank is left out";
  run([&](Channel& channel, int rank) -> std::string {
    const int last = world() - 1;
    io::Fd door;
    Address address;
    if (rank == last) {
      if (Error e = channel.open_door(&door, &address); !e.ok()) return text_of(e);
    }
    struct Where {
      sockaddr_storage storage;
      socklen_t length;
    };
    const Where mine = {address.storage, address.length};
    std::vector<Where> all(static_cast<size_t>(world()));
    Error e = channel.exchange(post(1, Op::kExchange), &mine, all.data(), sizeof(mine), Deadline(kLong));
    if (!e.ok()) return text_of(e);
    if (rank < last - 1) return needs(ending(channel), {"rank " + std::to_string(last), "died in the part"});
    Place place = {last - rank, 2, "part", {}};
    place.address.storage = all.back().storage;
    place.address.length = all.back().length;
    place.numbers = {last, last - 1};
    place.stop = channel.failed();
    if (rank == last) place.door = std::make_shared<io::Fd>(std::move(door));
    Channel part(place, {}, &channel);
    if (e = part.open(Deadline(kLong), kLong); !e.ok()) return text_of(e);
    int both[2];
    e = part.exchange(post(1, Op::kExchange), &rank, both, sizeof(rank), Deadline(kLong));
    if (!e.ok() || both[0] != last || both[1] != last - 1) return "exchange of the part: " + text_of(e);
    const Error failure(STRATA_UNAVAILABLE, part.who(0) + " died in the part");
    if (rank == last) (void)part.fail(failure, failure);
    return needs(ending(part), {"rank " + std::to_string(last), "in the part"});
  });
}

TEST_P(ControlChannel, ExchangesBringEveryRanksBytesToAll) {
  run([&](Channel& channel, int rank) -> std::string {
    uint64_t number = 0;
    for (uint64_t bytes : {uint64_t{0}, uint64_t{1}, uint64_t{333}, uint64_t{1} << 20}) {
      for (int again = 0; again < 3; ++again) {
        const std::string mine(bytes, static_cast<char>('a' + rank));
        std::string all(bytes * static_cast<uint64_t>(channel.world()), '?');
        const Error e = channel.exchange(post(++number, Op::kExchange, bytes, "norm"), mine.data(), all.data(), bytes,
                                         Deadline(kLong));
        if (!e.ok()) return text_of(e);
        for (uint64_t k = 0; k < all.size(); ++k) {
          if (all[k] != static_cast<char>('a' + k / bytes)) return "byte " + std::to_string(k) + " is wrong";
        }
        if (Error posted = channel.post(post(++number), Deadline(kLong)); !posted.ok()) return text_of(posted);
      }
    }
    return "";
  });
}

// Ranks of unequal pace post as they come, far ahead of each other, and an exchange brings them together.
TEST_P(ControlChannel, PostsWaitForNobody) {
  run([&](Channel& channel, int rank) -> std::string {
    uint64_t number = 0;
    for (int round = 0; round < 3; ++round) {
      if (rank == round % channel.world()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      for (int k = 0; k < 3'000; ++k) {
        if (Error e = channel.post(post(++number), Deadline(kLong)); !e.ok()) return text_of(e);
      }
      std::vector<char> all(static_cast<size_t>(channel.world()));
      const Error e = channel.exchange(post(++number, Op::kExchange, 1), "x", all.data(), 1, Deadline(kLong));
      if (!e.ok()) return text_of(e);
    }
    return "";
  });
}

TEST_P(ControlChannel, ADifferenceIsNamedOnEveryRank) {
  if (world() == 1) GTEST_SKIP() << "one rank differs from nobody";
  run([&](Channel& channel, int rank) -> std::string {
    for (uint64_t k = 1; k <= 5; ++k) (void)channel.post(post(k), Deadline(kLong));
    const bool odd = rank == channel.world() - 1;
    (void)channel.post(odd ? post(6, Op::kReduceScatter, 128, "grad layer3") : post(6), Deadline(kLong));
    return needs(ending(channel),
                 {"FAILED_PRECONDITION", "call 6: rank 0 is in all_gather [gather layer3] (64 bytes",
                  "rank " + std::to_string(channel.world() - 1), "in reduce_scatter [grad layer3] (128 bytes"});
  });
}

// A rank that waits in an exchange learns at once that another is somewhere else.
TEST_P(ControlChannel, AnExchangeAgainstAnotherCallIsNamed) {
  if (world() == 1) GTEST_SKIP() << "one rank differs from nobody";
  for (int odd : {0, 1}) {
    run([&](Channel& channel, int rank) -> std::string {
      std::vector<char> all(16 * static_cast<size_t>(channel.world()));
      Error e;
      if (rank == odd) {
        e = channel.post(post(1), Deadline(kLong));
      } else {
        e = channel.exchange(post(1, Op::kExchange, 16, "norm"), "0123456789abcdef", all.data(), 16, Deadline(kLong));
        if (e.ok()) return "the exchange was done";
      }
      return needs(ending(channel), {"FAILED_PRECONDITION", "call 1", "exchange [norm]", "all_gather"});
    });
  }
}

TEST_P(ControlChannel, FailuresReachEveryRankAndTheFirstStays) {
  if (world() == 1) GTEST_SKIP() << "nobody is told";
  run([&](Channel& channel, int rank) -> std::string {
    if (rank == 1) {
      (void)channel.fail({STRATA_DATA_LOSS, "shard 3 cannot be read"}, {STRATA_CANCELLED, "rank 1 gave up: shard 3"});
      (void)channel.fail({STRATA_INTERNAL, "second"}, {STRATA_INTERNAL, "second"});
      return needs(ending(channel), {"DATA_LOSS: shard 3 cannot be read"});
    }
    const std::string told = needs(ending(channel), {"CANCELLED: rank 1 gave up: shard 3"});
    if (!told.empty()) return told;
    return needs(text_of(channel.post(post(1), Deadline(kLong))), {"CANCELLED: rank 1 gave up"});
  });
}

TEST_P(ControlChannel, AMissingRankIsNamedAtTheDeadline) {
  if (world() == 1) GTEST_SKIP() << "nobody is missing";
  for (int missing : {0, 1}) {
    run([&](Channel& channel, int rank) -> std::string {
      if (rank != missing) (void)channel.post(post(1), Deadline(std::chrono::milliseconds(200)));
      return needs(
          ending(channel),
          {"DEADLINE_EXCEEDED", "call 1, all_gather [gather layer3]: waited 0.200 s: rank " + std::to_string(missing),
           "is missing, after it began 0 collectives"});
    });
  }
}

TEST_P(ControlChannel, ARankThatLeavesIsMissedOnlyByThoseWhoWait) {
  if (world() == 1) GTEST_SKIP() << "nobody leaves";
  for (int leaver : {0, 1}) {
    run([&](Channel& channel, int rank) -> std::string {
      std::vector<char> all(static_cast<size_t>(channel.world()));
      const Error met = channel.exchange(post(1, Op::kExchange, 1), "x", all.data(), 1, Deadline(kLong));
      if (!met.ok()) return text_of(met);
      if (rank == leaver) return "";  // with all done that it began
      (void)channel.post(post(2), Deadline(kLong));
      return needs(ending(channel), {"UNAVAILABLE", "rank " + std::to_string(leaver), "closed"});
    });
  }
}

// ---- ranks that are processes, and end ----

std::string post_until_error(Processes& self, const Place& place, std::chrono::nanoseconds silence) {
  return join_and_run(
      place,
      [&](Channel& channel, int) -> std::string {
        std::vector<char> all(static_cast<size_t>(channel.world()));
        for (uint64_t number = 1;; ++number) {
          const Error e = number % 3 ? channel.post(post(number), Deadline(kLong))
                                     : channel.exchange(post(number, Op::kExchange, 1, "norm"), "x", all.data(), 1,
                                                        Deadline(kLong));
          if (!e.ok()) return text_of(channel.failure());
          if (number == 30) self.say("running");
        }
      },
      silence);
}

TEST(ControlChannelDeath, KillNineIsNamedOnEveryRank) {
  for (bool tcp : {false, true}) {
    for (int round = 0; round < 6; ++round) {
      const Meeting meeting(tcp);
      Processes ranks;
      for (int r = 0; r < 3; ++r) {
        ranks.start([&, r](Processes& self) { return post_until_error(self, meeting.place(r, 3), kLong); });
      }
      for (int r = 0; r < 3; ++r) ASSERT_EQ(ranks.line(r), "running");
      const int killed = round % 3;
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      ranks.signal(killed, SIGKILL);
      for (int r = 0; r < 3; ++r) {
        if (r == killed) continue;
        EXPECT_EQ(needs(ranks.line(r), {"UNAVAILABLE", "call ", "[", "rank " + std::to_string(killed),
                                        "pid " + std::to_string(ranks.pid(killed)), "died"}),
                  "");
      }
    }
  }
}

// A stopped process keeps its sockets; only its silence shows.
TEST(ControlChannelDeath, SilenceIsNoticed) {
  for (int stopped : {0, 1}) {
    const Meeting meeting(true);
    Processes ranks;
    for (int r = 0; r < 2; ++r) {
      ranks.start([&, r](Processes& self) {
        return post_until_error(self, meeting.place(r, 2), std::chrono::milliseconds(600));
      });
    }
    for (int r = 0; r < 2; ++r) ASSERT_EQ(ranks.line(r), "running");
    ranks.signal(stopped, SIGSTOP);
    EXPECT_EQ(needs(ranks.line(1 - stopped),
                    {"DEADLINE_EXCEEDED", "rank " + std::to_string(stopped), "has said nothing for 0.600 s"}),
              "");
    ranks.signal(stopped, SIGCONT);
    EXPECT_NE(ranks.line(stopped), "");
  }
}

// ---- meeting ----

std::string open_alone(const Place& place, std::chrono::milliseconds limit) {
  Channel channel(place, {});
  return text_of(channel.open(Deadline(limit), kLong));
}

TEST(ControlChannelMeeting, WhoNeverComesIsNamed) {
  for (bool tcp : {false, true}) {
    const Meeting meeting(tcp);
    std::string guest;
    std::thread one([&] { guest = open_alone(meeting.place(1, 4), std::chrono::milliseconds(1500)); });
    const std::string rank0 = open_alone(meeting.place(0, 4), std::chrono::milliseconds(500));
    one.join();
    EXPECT_EQ(needs(rank0, {"DEADLINE_EXCEEDED", "waited 0.500 s", "rank 2, rank 3 never came", meeting.address.text}),
              "");
    EXPECT_EQ(needs(guest, {"rank 2, rank 3 never came"}), "") << "rank 0's words";
    EXPECT_EQ(needs(open_alone(meeting.place(1, 2), std::chrono::milliseconds(200)),
                    {"DEADLINE_EXCEEDED", "waited 0.200 s for rank 0", meeting.address.text}),
              "");
  }
}

// Rank 0 waits on and on: the guest's own deadline says who is not there.
TEST(ControlChannelMeeting, AGuestKnowsWhoIsMissing) {
  const Meeting meeting(true);
  std::thread rank0([&] { (void)open_alone(meeting.place(0, 3), std::chrono::milliseconds(1000)); });
  const std::string guest = open_alone(meeting.place(2, 3), std::chrono::milliseconds(500));
  rank0.join();
  EXPECT_EQ(needs(guest, {"DEADLINE_EXCEEDED", "waited 0.500 s for rank 1"}), "");
}

TEST(ControlChannelMeeting, WorldsThatDifferAndRanksThatComeTwiceAreRefused) {
  for (bool twice : {false, true}) {
    const Meeting meeting(true);
    std::string guests[2];
    std::thread one([&] { guests[0] = open_alone(meeting.place(1, 3), std::chrono::seconds(10)); });
    std::thread other([&] { guests[1] = open_alone(meeting.place(1, twice ? 3 : 2), std::chrono::seconds(10)); });
    const std::string rank0 = open_alone(meeting.place(0, 3), std::chrono::seconds(10));
    one.join();
    other.join();
    const std::string want = twice ? "there already" : "says world 2, rank 0 says 3";
    EXPECT_EQ(needs(rank0, {"FAILED_PRECONDITION", "rank 1", want}), "");
    EXPECT_EQ(needs(guests[1], {twice ? "" : want}), "");
    EXPECT_NE(guests[0], "");
  }
}

TEST(ControlChannelMeeting, OtherJobsAndStrangersAreSentAway) {
  const Meeting meeting(true);
  std::string results[2], other;
  std::thread ranks[2];
  for (int r = 0; r < 2; ++r) {
    ranks[r] = std::thread([&, r] {
      if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
      results[r] = join_and_run(meeting.place(r, 2), [](Channel&, int) { return std::string(); });
    });
  }
  io::Fd stranger;
  while (!control_channel::connect_to(meeting.address, 100, &stranger).ok()) std::this_thread::yield();
  (void)!::send(stranger.get(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
  Place wrong = meeting.place(1, 2);
  wrong.job = "another";
  other = open_alone(wrong, std::chrono::seconds(5));
  for (std::thread& t : ranks) t.join();
  EXPECT_EQ(needs(other, {"FAILED_PRECONDITION", "of job \"another\" came to rank 0 of job \"" + meeting.job}), "");
  EXPECT_EQ(results[0], "");
  EXPECT_EQ(results[1], "");
}

TEST(ControlChannelMeeting, ATakenAddressIsAnErrorThatSaysSo) {
  for (bool tcp : {false, true}) {
    const Meeting meeting(tcp);
    io::Fd taken;
    ASSERT_TRUE(control_channel::listen_at(meeting.address, &taken).ok());
    EXPECT_EQ(needs(open_alone(meeting.place(0, 2), std::chrono::seconds(5)),
                    {"ALREADY_EXISTS", meeting.address.text, "another job"}),
              "");
  }
}

TEST(ControlChannelMeeting, DeathBeforeAllHaveComeIsNamed) {
  const Meeting meeting(false);
  Processes ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&, r](Processes&) { return open_alone(meeting.place(r, 3), std::chrono::seconds(20)); });
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  ranks.signal(1, SIGKILL);
  EXPECT_EQ(needs(ranks.line(0), {"UNAVAILABLE", "rank 1", "pid " + std::to_string(ranks.pid(1)), "came and went"}),
            "");
}

TEST(ControlChannelMeeting, AddressesThatAreNoneAreRefused) {
  Address out;
  for (const char* bad : {"", "host", ":80", "host:", "1.2.3.4:notaport"}) {
    EXPECT_FALSE(control_channel::resolve(bad, &out).ok()) << bad;
  }
  EXPECT_TRUE(control_channel::resolve("[::1]:80", &out).ok());
}

}  // namespace
}  // namespace strata::test

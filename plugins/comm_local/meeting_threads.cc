// Ranks that are threads: a registry of the groups of this process, by job name.
//
// The registry is the plugin's only global, because threads of one process have nothing else in common. It is guarded
// by its mutex and holds a group from its first rank's coming to its last rank's leaving. A job whose ranks have begun
// to leave is waited for, so that ranks may close and open again under one name without agreeing on a moment; a job
// that is whole refuses newcomers.
#include <condition_variable>
#include <map>

#include "meeting.h"

namespace comm_local {
namespace {

struct Group {
  explicit Group(int size) : world(size), taken(static_cast<size_t>(size), false), area(std::make_unique<Area>()) {}
  const int world;
  int present = 0;
  bool ending = false;  // somebody has left
  std::vector<bool> taken;
  std::vector<Mapping> kept;
  std::unique_ptr<Area> area;
};

struct Registry {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::string, std::shared_ptr<Group>> groups;
};

Registry& registry() {
  static Registry one;
  return one;
}

class ThreadMembership : public Membership {
 public:
  ThreadMembership(std::string job, std::shared_ptr<Group> group) : job_(std::move(job)), group_(std::move(group)) {}
  ~ThreadMembership() override {
    {
      std::lock_guard lock(registry().mutex);
      group_->ending = true;
      if (--group_->present == 0) registry().groups.erase(job_);
    }
    registry().changed.notify_all();
  }
  void keep(std::vector<Mapping> memory) override {
    std::lock_guard lock(registry().mutex);
    for (Mapping& mapping : memory) group_->kept.push_back(std::move(mapping));
  }

 private:
  std::string job_;
  std::shared_ptr<Group> group_;
};

Error take_seat(const Identity& id, const Deadline& deadline, std::shared_ptr<Group>* out) {
  const std::string what = "opening rank " + std::to_string(id.rank) + " of job \"" + id.job + "\": ";
  std::unique_lock lock(registry().mutex);
  auto gone = [&] {
    auto it = registry().groups.find(id.job);
    return it == registry().groups.end() || !it->second->ending;
  };
  if (!registry().changed.wait_until(lock, deadline.point(), gone)) {
    return {STRATA_ALREADY_EXISTS, what + "ranks of an earlier job of this name in this process have not closed"};
  }
  std::shared_ptr<Group>& group = registry().groups[id.job];
  if (!group) group = std::make_shared<Group>(id.world);
  if (group->world != id.world) {
    return {STRATA_INVALID_ARGUMENT,
            what + "its world is " + std::to_string(id.world) + ", other ranks said " + std::to_string(group->world)};
  }
  if (group->taken[static_cast<size_t>(id.rank)]) {
    return {STRATA_ALREADY_EXISTS, what + "this process has a job of that name with that rank already"};
  }
  group->taken[static_cast<size_t>(id.rank)] = true;
  ++group->present;
  *out = group;
  return {};
}

class SoleMembership : public Membership {
 public:
  Area area{};
};

}  // namespace

void Met::take_board(Area* area, const Identity& id) {
  board = std::make_unique<Board>(area, id.rank, id.world);
  if (whole) board->belong_to(whole, members);
  board->come();
}

Error meet_alone(const Identity& id, Met* out) {
  auto sole = std::make_unique<SoleMembership>();
  out->take_board(&sole->area, id);
  out->membership = std::move(sole);
  return {};
}

Error meet_threads(const Identity& id, const Deadline& deadline, Met* out) {
  std::shared_ptr<Group> group;
  Error e = take_seat(id, deadline, &group);
  if (!e.ok()) return e;
  out->take_board(group->area.get(), id);
  out->membership = std::make_unique<ThreadMembership>(id.job, group);
  return {};
}

}  // namespace comm_local

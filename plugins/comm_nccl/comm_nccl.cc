// comm_nccl - strata.collective/1 on NVIDIA GPUs: NCCL moves the data, a control channel of our own watches.
//
// This file is the ABI side: what libs/collective_kit puts behind the slots. Reading order of the rest: address (where
// rank 0 is), libs/control_channel (posts, exchanges, who is missing), library (NCCL at run time), communicators,
// collectives (what is enqueued), flights (what is on the device), memory, gpu.
//
// A call on a stream posts and enqueues; it waits for nobody. Ranks that differ make NCCL wait for ever, so the
// channel's watcher, which compares the posts a moment later, is what ends it: it seals the fate of the instance,
// aborts both communicators and sets the events that are left. The first failure is the answer of every later call. A
// call without a stream waits for the device anyhow, so there the ranks are compared before anything is enqueued.
#include <cstring>
#include <mutex>

#include "address.h"
#include "collective_kit/slots.h"
#include "collectives.h"
#include "control_channel/channel.h"
#include "flights.h"
#include "memory.h"
#include "plugin_kit/leave_behind.h"
#include "rank_env/rank_env.h"
#include "strata/plugin.h"

using namespace comm_nccl;
using strata::collective_kit::Op;
using strata::collective_kit::Part;
using strata::control_channel::Channel;
using strata::control_channel::Place;
using strata::control_channel::Post;
using strata::plugin_kit::attempt;
using strata::plugin_kit::join;
using strata::plugin_kit::leave_behind;
using strata::plugin_kit::Options;

namespace {

// How long a rank that cannot work itself waits for the others, to tell them why.
constexpr std::chrono::seconds kToTellWhy{5};

// What the ranks tell each other when they meet.
struct Card {
  strata_status code;
  int32_t nccl_version;
  int32_t deterministic;
  ncclUniqueId id;  // rank 0's counts
  char text[640];
};

// Where rank 0 of a part listens, if this is one, and why it cannot.
struct Door {
  sockaddr_storage storage;
  socklen_t length;
  strata_status code;
  char text[256];
};

struct Settings {
  Settings() = default;
  explicit Settings(const Options& options)
      : libnccl(options.text("libnccl", "")),
        device_id(options.integer("device_id", -1)),
        deterministic(options.flag("deterministic_reduce", false)),
        nvls(options.flag("nvls", false)) {}
  std::string libnccl;
  int64_t device_id = -1;
  bool deterministic = false;
  bool nvls = false;
};

// All that an instance has. A forked child leaves it alone: threads, sockets and GPU are its parent's.
struct Held {
  strata::rank_env::Identity id;
  Settings settings;
  std::shared_ptr<const Nccl> nccl;
  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<Communicators> communicators;
  std::unique_ptr<Channel> channel;
  std::unique_ptr<Flights> flights;
  std::unique_ptr<Memory> memory;
  std::unique_ptr<Collectives> collectives;
  std::once_flag stopped;
};

}  // namespace

struct strata_comm : strata::collective_kit::Comm {
  static constexpr char kName[] = "comm_nccl";
  Error open(const strata_open_args& args);
  Error open_part(strata_comm& whole, const Part& part, const Deadline& deadline);
  void leave();
  void caps(strata_collective_caps* out) const;
  Error alloc(uint64_t bytes, void** out);
  Error free(void* ptr);
  Error run(Op op, const strata_coll_args& args, const Deadline& deadline, strata_event* done);
  Error exchange(const void* in, void* out, uint64_t bytes, const strata_coll_args& args, const Deadline& deadline) {
    return meet(Op::kExchange, in, out, bytes, args, deadline);
  }
  Error fail(const Error& mine, const Error& others) { return held_->channel->fail(mine, others); }
  std::string who() const { return held_->channel->who(held_->id.rank); }

 private:
  Error find_door(strata_comm& whole, const Part& part, const Deadline& deadline, Place* place);
  Error meet_others(Place place, const std::optional<ncclUniqueId>& given, Channel* whole, const Deadline& deadline);
  void prepare();
  Error join_others(const Error& ready, Card card, const Deadline& deadline);
  Error start();
  Error look_at_device();
  void stop_device(const Error& failure);
  Error read(Op op, const strata_coll_args& args);
  Error launch(const strata_coll_args& args, const Gpu::Place& place, const Deadline& deadline, strata_event* done,
               uint64_t* flight);
  Error meet(Op op, const void* in, void* out, uint64_t bytes, const strata_coll_args& args, const Deadline& deadline);
  void log(strata_log_level level, const std::string& text) const { host->log(host->ctx, level, kName, text.c_str()); }

  std::unique_ptr<Held> held_ = std::make_unique<Held>();
  std::unique_ptr<Call> call_;  // the last one
};

// ---- opening -------------------------------------------------------------------------------------------------------

Error strata_comm::open(const strata_open_args& args) {
  const Options options(args.options);
  held_->settings = Settings(options);
  if (Error e = strata::rank_env::identify(args, &held_->id); !e.ok()) return e;
  const auto& id = held_->id;
  Address rank0;
  if (Error e = find_rank0(id, options, &rank0); !e.ok()) return e;
  std::optional<ncclUniqueId> given;
  if (Error e = given_unique_id(options, &given); !e.ok()) return e;
  return meet_others({id.rank, id.world, id.job, rank0}, given, nullptr, Deadline::after(deadline_ns));
}

// The part meets as a job of its own; GPU, NCCL's library and settings are those of the whole.
Error strata_comm::open_part(strata_comm& whole, const Part& part, const Deadline& deadline) {
  auto& id = held_->id;
  id = whole.held_->id;
  id.rank = part.rank;
  id.world = part.world();
  id.job += part.name;
  id.local_rank = id.local_world = 0;
  Channel* channel = whole.held_->channel.get();
  Place place = {id.rank, id.world, id.job, {}};
  for (int r = 0; r < part.world(); ++r) {
    const int member = part.members[static_cast<size_t>(r)];
    place.numbers.push_back(channel->number(member));
    if (!channel->on_this_machine(member)) continue;
    id.local_rank += r < part.rank;
    ++id.local_world;
  }
  place.stop = channel->failed();
  held_->settings = whole.held_->settings;
  held_->nccl = whole.held_->nccl;
  held_->gpu = whole.held_->gpu;
  if (whole.held_->id.world > 1) {
    if (Error e = find_door(whole, part, deadline, &place); !e.ok()) return e;
  }
  return meet_others(std::move(place), {}, channel, deadline);
}

// Rank 0 of every part listens, and tells all where.
Error strata_comm::find_door(strata_comm& whole, const Part& part, const Deadline& deadline, Place* place) {
  Channel& channel = *whole.held_->channel;
  auto door = std::make_shared<strata::io::Fd>();
  Door mine{};
  if (part.rank == 0) {
    Address address;
    const Error e = channel.open_door(door.get(), &address);
    mine = {address.storage, address.length, e.code(), {}};
    std::strncpy(mine.text, e.text().c_str(), sizeof(mine.text) - 1);
    place->door = std::move(door);
  }
  std::vector<Door> doors(static_cast<size_t>(channel.world()));
  Post post{};
  post.call = whole.call_->number;
  post.bytes = sizeof(mine);
  std::strncpy(post.label, "split", sizeof(post.label) - 1);
  if (Error e = channel.exchange(post, &mine, doors.data(), sizeof(mine), deadline); !e.ok()) return e;
  const int rank0 = part.members[0];
  const Door& theirs = doors[static_cast<size_t>(rank0)];
  if (theirs.code != STRATA_OK) return {theirs.code, join(channel.who(rank0), ": ", theirs.text)};
  place->address.storage = theirs.storage;
  place->address.length = theirs.length;
  place->address.text = "the door of " + channel.who(rank0);
  return {};
}

// `whole`: of what this is a part.
Error strata_comm::meet_others(Place place, const std::optional<ncclUniqueId>& given, Channel* whole,
                               const Deadline& deadline) {
  const auto& id = held_->id;
  const auto* sync = strata::plugin_kit::host_interface<strata_sync_api>(host, STRATA_HOST_SYNC);
  if (!sync) return {STRATA_FAILED_PRECONDITION, "the host has no " STRATA_HOST_SYNC};
  call_ = std::make_unique<Call>(id.rank, id.world);
  Card card{};
  if (given) card.id = *given;
  Error ready = attempt([&] { prepare(); });
  if (ready.ok() && id.world > 1) {
    card.nccl_version = held_->nccl->version;
    if (id.rank == 0 && !given && held_->nccl->get_unique_id(&card.id) != ncclSuccess) {
      ready = {STRATA_INTERNAL, "NCCL made no unique id"};
    }
  }
  if (!ready.ok() && id.world == 1) return ready;
  if (ready.ok() && id.world > 1) held_->communicators = std::make_shared<Communicators>(held_->nccl, held_->gpu);
  if (ready.ok()) held_->flights = std::make_unique<Flights>(held_->gpu, sync);
  Channel::Hooks hooks = {[this](const Error& failure) { stop_device(failure); }, [this] { return look_at_device(); }};
  held_->channel = std::make_unique<Channel>(std::move(place), std::move(hooks), whole);
  const Deadline meeting =
      ready.ok() ? deadline
                 : Deadline(std::min<std::chrono::nanoseconds>(kToTellWhy, std::chrono::nanoseconds(deadline_ns)));
  Error e = held_->channel->open(meeting, std::chrono::nanoseconds(deadline_ns));
  if (!e.ok()) return ready.ok() ? e : ready;
  e = attempt([&] { return join_others(ready, card, deadline); });
  if (e.ok()) return e;
  return fail(e, ready.ok() ? e : Error(e.code(), who() + " cannot open: " + e.text()));
}

// What needs no other rank: NCCL's library and the GPU.
void strata_comm::prepare() {
  if (held_->gpu) return;  // the whole's
  const Settings& settings = held_->settings;
  if (held_->id.world > 1) {
    // NCCL has no other switch for it, and reads it once, before the first communicator of the process.
    if (!settings.nvls) ::setenv("NCCL_NVLS_ENABLE", "0", 0);
    held_->nccl = load_nccl(settings.libnccl);
    log(STRATA_LOG_INFO, join("NCCL ", version_text(held_->nccl->version), " at ", held_->nccl->path));
  }
  held_->gpu = Gpu::open(settings.device_id, held_->id.local_rank);
}

Error strata_comm::join_others(const Error& ready, Card card, const Deadline& deadline) {
  const auto& id = held_->id;
  card.code = ready.code();
  card.deterministic = held_->settings.deterministic;
  std::strncpy(card.text, ready.text().c_str(), sizeof(card.text) - 1);
  Post post{};
  post.bytes = sizeof(card);
  std::strncpy(post.label, join("job ", id.job).c_str(), sizeof(post.label) - 1);
  std::vector<Card> cards(static_cast<size_t>(id.world));
  if (Error e = held_->channel->exchange(post, &card, cards.data(), sizeof(card), deadline); !e.ok()) return e;
  for (int r = 0; r < id.world; ++r) {
    const Card& theirs = cards[static_cast<size_t>(r)];
    if (theirs.code != STRATA_OK) {
      if (r == id.rank) return ready;
      return {theirs.code, join(held_->channel->who(r), " cannot open: ", theirs.text)};
    }
    if (theirs.nccl_version != cards[0].nccl_version || theirs.deterministic != cards[0].deterministic) {
      auto text = [](const Card& c) {
        return join("NCCL ", version_text(c.nccl_version), ", deterministic_reduce = ", c.deterministic != 0);
      };
      return {STRATA_FAILED_PRECONDITION,
              join("ranks differ: rank 0 has ", text(cards[0]), ", ", held_->channel->who(r), " has ", text(theirs))};
    }
  }
  const auto current = held_->gpu->enter();
  if (id.world > 1) {
    Channel* channel = held_->channel.get();
    Error e = held_->communicators->open(id.rank, id.world, cards[0].id, deadline,
                                         [channel] { return !channel->failure().ok(); });
    if (!e.ok()) return e;
  }
  return start();
}

Error strata_comm::start() {
  const auto& id = held_->id;
  held_->memory = std::make_unique<Memory>(held_->gpu, held_->communicators,
                                           [this](const std::string& text) { log(STRATA_LOG_WARN, text); });
  held_->collectives =
      std::make_unique<Collectives>(held_->gpu, held_->communicators, id.rank, id.world, held_->settings.deterministic);
  held_->collectives->use_buffer(held_->memory->alloc(Collectives::kBufferBytes));
  if (id.world == 1) return {};
  Flights& flights = *held_->flights;
  uint64_t flight;
  {
    const Flights::Launch launch(flights);
    const cudaStream_t stream = held_->gpu->own_stream();
    const cudaEvent_t begin = held_->gpu->mark(stream);
    if (Error e = held_->collectives->warm_up(stream); !e.ok()) return e;
    flight = flights.add("opening", begin, stream, deadline_ns, nullptr);
  }
  return flights.wait(flight);
}

// On the watcher.
Error strata_comm::look_at_device() {
  if (!held_->flights) return {};
  const auto current = held_->gpu->enter();
  Error e = held_->flights->look();
  return e.ok() && held_->communicators ? held_->communicators->asynchronous_error() : e;
}

// ---- ending --------------------------------------------------------------------------------------------------------

void strata_comm::stop_device(const Error& failure) {
  std::call_once(held_->stopped, [&] {
    if (!held_->flights) return;
    const auto current = held_->gpu->enter();
    (void)attempt([&] { held_->flights->settle(); });
    held_->flights->fate()->seal(failure);
    const std::string stuck = held_->communicators ? held_->communicators->abort() : "";
    if (!stuck.empty()) log(STRATA_LOG_ERROR, stuck);
    held_->flights->stop(failure);
  });
}

void strata_comm::leave() {
  if (in_child()) {
    leave_behind(held_);
    return;
  }
  if (!held_->channel) return;
  if (held_->flights) {
    const auto current = held_->gpu->enter();
    (void)attempt([&] { return held_->flights->look(); });
    const Error closed(STRATA_CANCELLED, who() + " closed before its collectives were done");
    if (!held_->flights->empty()) (void)fail(closed, closed);
  }
  held_->channel->leave();
  if (const Error failure = held_->channel->failure(); !failure.ok()) stop_device(failure);
  if (!held_->gpu) return;
  const auto current = held_->gpu->enter();
  // After an abort, what was enqueued behind it still comes: sums, marks. What does not end keeps what it uses.
  const bool idle = !held_->flights || held_->flights->drain();
  // Memory first: it is registered with the communicators.
  if (held_->memory && idle) (void)attempt([&] { held_->memory->free_all(); });
  const std::string stuck = held_->communicators ? held_->communicators->destroy() : "";
  if (!stuck.empty()) log(STRATA_LOG_ERROR, stuck);
  if (!idle || (held_->communicators && held_->communicators->leaked())) leave_behind(held_);
}

// ---- calls ---------------------------------------------------------------------------------------------------------

void strata_comm::caps(strata_collective_caps* out) const {
  out->rank = held_->id.rank;
  out->world = held_->id.world;
  out->local_rank = held_->id.local_rank;
  out->local_world = held_->id.local_world;
  out->flags = STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT |
               (held_->collectives->fixed_order() ? STRATA_COLL_FIXED_ORDER : 0);
  out->memory = STRATA_CUDA;
  out->job = held_->id.job.c_str();
}

Error strata_comm::alloc(uint64_t bytes, void** out) {
  const auto current = held_->gpu->enter();
  *out = held_->memory->alloc(bytes);
  return {};
}

Error strata_comm::free(void* ptr) {
  const auto current = held_->gpu->enter();
  if (held_->memory->free(ptr)) return {};
  return {STRATA_INVALID_ARGUMENT, "free of an address that alloc did not give out"};
}

Error strata_comm::read(Op op, const strata_coll_args& args) {
  if (Error e = call_->read(call_->number + 1, op, args); !e.ok()) return e;
  for (size_t k = 0; k < call_->items.size(); ++k) {
    const Item& item = call_->items[k];
    if (item.count == 0) continue;
    Error e = attempt([&] {
      if (call_->reads_input_of(held_->id.rank)) held_->gpu->require_reach(item.in, "input");
      held_->gpu->require_reach(item.out, "output");
    });
    if (!e.ok()) return call_->bad_item(k, e.text());
  }
  return {};
}

Error strata_comm::run(Op op, const strata_coll_args& args, const Deadline& deadline, strata_event* done) {
  if (op == Op::kBarrier) return meet(op, nullptr, nullptr, 0, args, deadline);
  if (Error e = held_->channel->failure(); !e.ok()) return e;
  const auto current = held_->gpu->enter();
  Gpu::Place place{};
  Error e = attempt([&] {
    place = held_->gpu->place(args.stream);
    return read(op, args);
  });
  if (!e.ok()) return fail(e, {STRATA_FAILED_PRECONDITION, who() + " gave up: " + e.text()});
  uint64_t flight = 0;
  e = launch(args, place, deadline, place.wait ? nullptr : done, &flight);
  if (!e.ok() || !place.wait) return e;
  e = held_->flights->wait(flight);
  return e.ok() ? strata::plugin_kit::set_done(host, done) : e;
}

Error strata_comm::launch(const strata_coll_args& args, const Gpu::Place& place, const Deadline& deadline,
                          strata_event* done, uint64_t* flight) {
  Flights& flights = *held_->flights;
  const Flights::Launch launching(flights);
  Post post{};
  call_->describe(args, &post);
  // A caller that waits anyhow has the ranks compared first; one that does not, meanwhile.
  Channel& channel = *held_->channel;
  Error e = place.wait ? channel.exchange(post, nullptr, nullptr, 0, deadline) : channel.post(post, deadline);
  if (!e.ok()) return e;
  const cudaEvent_t begin = held_->gpu->mark(place.stream);
  e = held_->collectives->launch(*call_, place.stream);
  // Also after an error: some of it may be enqueued.
  *flight = flights.add(call_->what, begin, place.stream, deadline.left_ns(), e.ok() ? done : nullptr);
  return e;
}

Error strata_comm::meet(Op op, const void* in, void* out, uint64_t bytes, const strata_coll_args& args,
                        const Deadline& deadline) {
  if (Error e = held_->channel->failure(); !e.ok()) return e;
  if (Error e = call_->read(call_->number + 1, op, args); !e.ok()) return e;
  Post post{};
  call_->describe(args, &post);
  post.bytes = bytes;
  return held_->channel->exchange(post, in, out, bytes, deadline);
}

namespace {

const void* STRATA_CALL get_interface(const char* id) {
  return id && std::strcmp(id, STRATA_COLLECTIVE) == 0 ? &strata::collective_kit::Slots<strata_comm>::table : nullptr;
}

const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "comm_nccl", "0.1.0", get_interface};

}  // namespace

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }

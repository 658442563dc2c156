// weights.h - where every weight is, and the way of a unit through fetch, gather, use and release.
//
// A unit is either whole (stages 0 to 2, world 1, the resident unit): its full buffer stays on every rank and the
// views point into it; after an update at stage 1 or above the other ranks' slices are gathered once, in place, by the
// first fetch. Or it is sharded (stage 3): the rank keeps its slice (on the device or in a tier) and a fetch gathers
// all slices straight into a slab. The gathered flat buffer is the params: no copy out.
// Where the tier of shards is no memory, units of up to `max_in_cpu` elements, spread over the order, have theirs in
// host memory all the same; the others' are read by shard_reader.h.
//
//   sharded unit:   SHARDED --fetch/prefetch--> GATHERING --> LIVE (refs > 0) --release--> SHARDED or KEPT --> SHARDED
//
// A gather starts only when the unit's own update is done, on the collective thread. All decisions (prefetch, keep,
// evict) are taken on the host thread from host calls and sizes, so that every rank takes the same ones.
// On a device with streams a fetch returns once the gather is enqueued and makes the host's stream wait for it; the
// place of a released unit is filled again only behind what the host's stream did with it.
// Host thread only, except owned() and tier(), which the update thread uses, too.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "core/arena.h"
#include "core/comm_queue.h"
#include "core/layout.h"
#include "core/manifest/settings.h"
#include "core/plan.h"
#include "core/tier.h"
#include "core/weights/fetch_order.h"
#include "core/weights/shard_reader.h"
#include "core/weights/write_guard.h"

namespace strata {

// This rank's slice of a segment's weights: an address, or a place in a tier that is not addressable.
struct OwnedWeights {
  char* address = nullptr;
  const Region* region = nullptr;
  uint64_t offset = 0;  // bytes into the region
};

class Weights {
 public:
  // Where shards lie: on the device, or in `offload`; `memory`: the tier of host memory beside one that is none, or
  // NULL.
  struct Tiers {
    const Tier& offload;
    const Tier* memory;
  };
  // With check_weights it remembers what was fetched, for undo_write.
  Weights(const Layout& layout, const Settings& settings, const Device& device, const Collective& collective,
          CommQueue& queue, const Tiers& tiers, std::chrono::nanoseconds deadline, Counters& counters, Trace& trace);

  // What allocate will take. `pins`: host memory of shards is page-locked.
  void add_to(Plan* plan, bool pins) const;
  uint64_t shard_bytes(TierKind tier) const;
  // That a tier which was asked for holds nothing, or max_in_cpu keeps nothing, and why; "": they do.
  std::string idle_note() const;
  Status check_limits() const;  // every unit fits into max_live_parameters
  Status allocate(const std::vector<int>& cpus);

  Status fetch(uint32_t unit, const strata_stream* stream);
  Status release(uint32_t unit, const strata_stream* stream);
  // check_weights: where the host wrote into the weights that fetching `unit` brought, if it did; they are as they were
  // again. Right before the release, whose `stream` this is.
  struct Written {
    uint32_t unit = 0, segment = 0;  // of the layout
    uint64_t element = 0;            // the first one
  };
  Status undo_write(uint32_t unit, const strata_stream* stream, std::optional<Written>* written);
  bool any_fetched() const { return fetched_ > 0; }
  // Address of element 0 of a param while its unit is fetched, else NULL.
  void* address(const Param& owner) const;

  // What was enqueued with weights that were fetched is done, and gathers have read their shards: they may be written.
  Status wait_for_readers() const;
  // An update of `unit` is about to run, behind `after`; fetches wait for `updated`.
  void begin_update(uint32_t unit, Work updated, std::vector<Work>* after);
  // The step is over: views have ended, the recorded order becomes the prediction, slabs of old weights go.
  Status end_step();
  // Units in the order of first use in the last step, then the rest.
  std::vector<uint32_t> forward_order() const;
  Work updated(uint32_t unit) const { return slots_[unit].updated; }

  // Where this rank's own elements lie (stage 0: the whole segment).
  OwnedWeights owned(uint32_t unit, uint32_t segment) const;
  // Whether owned() will have an address: known before anything is allocated.
  bool addressable(uint32_t unit) const { return !sharded(unit) || tier(unit).addressable(); }
  // Whether that address is device memory.
  bool on_device(uint32_t unit) const { return !sharded(unit) || !offloaded(); }
  // The full buffer of a whole unit's segment.
  char* whole(uint32_t unit, uint32_t segment) const;
  const Tier& tier(uint32_t unit) const { return kept_[unit] ? *tiers_.memory : tiers_.offload; }
  const Tier& offload() const { return tiers_.offload; }
  // Weights of `unit` were written by hand on this rank's owned part: gather again at the next fetch.
  Status invalidate(uint32_t unit);

 private:
  // The end of what one of the host's streams does with a unit.
  struct Use {
    void* stream;
    Work end;
  };
  struct Slot {
    Memory memory;                      // whole buffer, or the device shard
    Region region;                      // the shard in a tier
    std::vector<uint64_t> full, shard;  // byte offset of each segment in the full and in the shard buffer
    uint64_t full_bytes = 0;
    uint64_t slab = 0;  // offset in slabs_
    uint32_t refs = 0;
    bool live = false;        // sharded: holds a slab
    bool prefetched = false;  // its slab was filled ahead and not used yet
    bool stale = false;       // whole: others' slices are old
    Work gathered, updated;
    Work shard_read;        // the last gather: it read the shard
    std::vector<Use> uses;  // what the host's streams do with it until it is released
  };
  // A range of slabs_ that a dropped unit lay in: filled again behind its uses.
  struct Dropped {
    uint64_t begin, end;
    std::vector<Use> uses;
  };

  bool sharded(uint32_t unit) const { return !layout_.is_whole(unit) && layout_.units[unit].elements > 0; }
  bool offloaded() const { return tiers_.offload.kind() != kDeviceTier; }
  uint64_t whole_bytes() const;
  uint64_t slab_bytes() const;
  uint64_t staging_bytes() const;  // a shard on its way from the tier
  uint64_t copy_bytes() const;     // what check_weights compares with
  // Buffers between a tier that is no memory and the device.
  struct Reads {
    uint64_t count = 0, bytes = 0;
    std::string note;
  };
  Reads reads() const;
  void choose_kept();
  Status acquire(uint32_t unit);
  Status bring(uint32_t unit, const strata_stream* stream);
  Status wait(uint32_t unit, const strata_stream* stream);
  Status note_use(uint32_t unit, const strata_stream* stream);
  std::vector<Work> uses_of_place(uint32_t unit);
  void drop(uint32_t unit);
  Status drop_after_gather(uint32_t unit);
  Status make_room(uint32_t unit);
  void release_one(uint32_t unit);
  void prefetch();
  bool prefetch_one(uint32_t unit);
  std::optional<uint64_t> take_slab(uint32_t unit);
  void submit_gather(uint32_t unit);
  char* full_buffer(uint32_t unit) const;
  uint64_t copy_place(uint32_t unit) const;
  uint64_t distance_to_next_use(uint32_t unit) const;
  std::string in_words(const std::string& key) const;

  const Layout& layout_;
  const Settings& manifest_;
  const ZeroSettings& settings_;
  const Device& device_;
  const Collective& collective_;
  CommQueue& queue_;
  const Tiers tiers_;
  const std::chrono::nanoseconds deadline_;
  Counters& counters_;
  Trace& trace_;
  std::vector<Slot> slots_;
  std::vector<bool> kept_;  // by unit: in tiers_.memory
  Memory slabs_, staging_;
  const bool check_writes_;
  WriteGuard guard_;
  Arena arena_;
  std::vector<Dropped> dropped_;
  std::vector<uint64_t> own_slab_;  // by unit, when all slabs fit at once: then nothing can fragment
  FetchOrder order_;
  std::vector<uint32_t> host_refs_;  // fetches per registered unit that were not released
  uint64_t fetched_ = 0;
  uint64_t live_elements_ = 0, prefetched_elements_ = 0;
  std::unique_ptr<ShardReader> reader_;
};

}  // namespace strata

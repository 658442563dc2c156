#include "core/snapshot.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <unordered_map>

#include "core/hash.h"

namespace strata {

namespace {

constexpr uint64_t kLoadElements = 1u << 18;  // read from the file at once
const char kSaveId[] = "strata.save_id";
const char kUnitStep[] = "strata.unit_step/";
const char kHostMeta[] = "host/";

strata_option option(const char* key, strata_option_type type) {
  strata_option o{};
  o.struct_size = sizeof(o);
  o.key = key;
  o.type = type;
  return o;
}

uint64_t new_save_id() {
  std::random_device random;
  return (static_cast<uint64_t>(random()) << 31) ^ random();  // 63 bits: it is kept as a signed integer
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

}  // namespace

// Owns the strings and tables that strata_ckpt_save_args points into.
struct Snapshot::Description {
  Snapshot& snapshot;
  std::vector<std::pair<uint32_t, uint32_t>> places;  // (unit, segment) of each entry of `segments`
  std::deque<std::vector<strata_ckpt_array>> arrays;
  std::vector<strata_ckpt_segment> segments;
  std::vector<strata_ckpt_param> params;
  std::deque<std::string> texts;
  std::vector<strata_option> meta;
  strata_ckpt_save_args args{};

  Description(Snapshot& s, bool weights_only, uint64_t save_id);
  void add_run(const RunState& run);
  void add_int(const std::string& key, uint64_t value);
  const strata_ckpt_save_args* finish(const char* root, const char* tag);

  static strata_status STRATA_CALL read(void* ctx, uint64_t segment, uint64_t array, uint64_t offset, uint64_t count,
                                        void* dst) {
    auto& self = *static_cast<Description*>(ctx);
    const auto [u, i] = self.places[segment];
    const Segment& s = self.snapshot.layout_.units[u].segments[i];
    const uint64_t first = offset - self.snapshot.layout_.owned(s).begin;
    const strata_ckpt_array& what = self.arrays[segment][array];
    const Status status = self.snapshot.tensors_.export_owned(u, i, what.name, first, count, dst);
    if (!status.ok()) return keep_failure(status);
    for (const Range& gap : s.gaps) {  // whatever memory has there
      const Range inside = intersect(gap, {offset, offset + count});
      const uint64_t size = dtype_size(what.dtype);
      if (inside.size() > 0) {
        std::memset(static_cast<char*>(dst) + (inside.begin - offset) * size, 0, inside.size() * size);
      }
    }
    return STRATA_OK;
  }
};

// `save_id` is new for each save and the same on all ranks: what a dead run left under the same tag never mixes in.
Snapshot::Description::Description(Snapshot& s, bool weights_only, uint64_t save_id) : snapshot(s) {
  add_int(kSaveId, save_id);
  const Layout& layout = s.layout_;
  std::map<std::pair<uint32_t, uint32_t>, uint64_t> index;
  for (uint32_t u = 0; u < layout.units.size(); ++u) {
    for (uint32_t i = 0; i < layout.units[u].segments.size(); ++i) {
      const Segment& seg = layout.units[u].segments[i];
      auto& list = arrays.emplace_back();
      list.push_back({sizeof(strata_ckpt_array), STRATA_ABI_MINOR, "weight", seg.dtype, 0});
      if (seg.trainable && !weights_only) {
        const auto& optim = s.states_.layout_of(seg);
        for (uint32_t a = 0; a < optim.canonical_count; ++a) {
          list.push_back({sizeof(strata_ckpt_array), STRATA_ABI_MINOR, optim.canonical[a], STRATA_F32, 0});
        }
      }
      const Range mine = seg.slice(layout.rank);
      index[{u, i}] = segments.size();
      places.emplace_back(u, i);
      segments.push_back({sizeof(strata_ckpt_segment), STRATA_ABI_MINOR, seg.name.c_str(), seg.elements, mine.begin,
                          mine.size(), list.data(), list.size(), sizeof(strata_ckpt_array)});
    }
  }
  const auto& all = s.registry_.params;
  for (uint32_t id = 0; id < all.size(); ++id) {
    const Param& p = all[id];
    strata_ckpt_param out{};
    out.struct_size = sizeof(out);
    out.name = p.name.c_str();
    out.dtype = p.dtype;
    out.ndim = static_cast<int32_t>(p.shape.size());
    out.shape = p.shape.data();
    out.segment = p.owner == id ? index[{p.home, p.segment}] : STRATA_NO_SEGMENT;
    out.offset = p.owner == id ? p.offset : 0;
    out.alias_of = p.owner == id ? nullptr : all[p.owner].name.c_str();
    params.push_back(out);
  }
}

void Snapshot::Description::add_int(const std::string& key, uint64_t value) {
  strata_option o = option(texts.emplace_back(key).c_str(), STRATA_OPT_INT);
  o.i = static_cast<int64_t>(value);
  meta.push_back(o);
}

void Snapshot::Description::add_run(const RunState& run) {
  add_int("strata.steps", run.steps);
  add_int("strata.applied_steps", run.applied);
  add_int("strata.skipped_steps", run.skipped);
  add_int("strata.stage", static_cast<uint64_t>(snapshot.layout_.stage));
  for (size_t u = 0; u < run.unit_steps.size(); ++u) {
    add_int(kUnitStep + snapshot.registry_.units[u].name, run.unit_steps[u]);
  }
  for (const auto& [key, value] : run.meta) {
    strata_option o = option(texts.emplace_back(kHostMeta + key).c_str(), STRATA_OPT_STRING);
    o.s = texts.emplace_back(value).c_str();
    meta.push_back(o);
  }
}

const strata_ckpt_save_args* Snapshot::Description::finish(const char* root, const char* tag) {
  args.struct_size = sizeof(args);
  args.root = root;
  args.tag = tag;
  args.rank = snapshot.layout_.rank;
  args.world = snapshot.layout_.world;
  args.segments = segments.data();
  args.segment_count = segments.size();
  args.segment_stride = sizeof(strata_ckpt_segment);
  args.params = params.data();
  args.param_count = params.size();
  args.param_stride = sizeof(strata_ckpt_param);
  args.meta = meta.data();
  args.meta_count = meta.size();
  args.meta_stride = sizeof(strata_option);
  args.read = read;
  args.read_ctx = this;
  return &args;
}

Snapshot::Snapshot(const Registry& registry, const Layout& layout, const Checkpoint& checkpoint,
                   const Consensus& consensus, Weights& weights, States& states, Tensors& tensors)
    : registry_(registry),
      layout_(layout),
      checkpoint_(checkpoint),
      consensus_(consensus),
      weights_(weights),
      states_(states),
      tensors_(tensors) {}

// ---- saving ------------------------------------------------------------------------------------------------------

Status Snapshot::save(const std::string& root, const std::string& tag, const RunState& run, bool weights) {
  const std::string what = "save of \"" + root + "/" + tag + "\"";
  uint64_t save_id = 0;
  STRATA_RETURN_IF_ERROR(begin_save(what, &save_id));
  ModelParts parts(layout_.places, checkpoint_, root, tag);
  STRATA_RETURN_IF_ERROR(make_room(parts, what));
  Description description(*this, false, save_id);
  description.add_run(run);
  const std::string part_root = parts.save_root();
  const strata_ckpt_save_args* args = description.finish(part_root.c_str(), tag.c_str());
  strata_ckpt_save* save = nullptr;
  const auto* api = checkpoint_.api();
  const Status written = take_failure(api->write(checkpoint_.self(), args, &save));
  Status done = end_phase(written, what, save);
  if (done.ok() && weights) done = write_weights(args, what, &save);
  if (done.ok()) done = publish(what, save);
  return publish_parts(parts, done, what);
}

Status Snapshot::make_room(ModelParts& parts, const std::string& what) {
  if (layout_.places.parts() == 1) return Ok();
  const Status mine = layout_.places.world.rank == 0 ? parts.make_room() : Ok();
  return consensus_.all_ok(Among::kEveryone, mine, what);
}

Status Snapshot::publish_parts(const ModelParts& parts, const Status& committed, const std::string& what) {
  if (layout_.places.parts() == 1) return committed;
  const bool mine = layout_.places.world.rank == 0;
  if (!committed.ok() && mine) parts.abandon();
  if (!committed.ok()) return committed;
  return consensus_.all_ok(Among::kEveryone, mine ? parts.publish() : Ok(), what);
}

Status Snapshot::export_weights(const std::string& path) {
  const std::string what = "export of \"" + path + "\"";
  const size_t slash = path.rfind('/');
  const std::string dir = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const std::string file =
      ModelParts::file_of_part(layout_.places, slash == std::string::npos ? path : path.substr(slash + 1));
  uint64_t save_id = 0;
  STRATA_RETURN_IF_ERROR(begin_save(what, &save_id));
  Description description(*this, true, save_id);
  strata_ckpt_save* save = nullptr;
  STRATA_RETURN_IF_ERROR(write_weights(description.finish(dir.c_str(), file.c_str()), what, &save));
  return publish(what, save);
}

Status Snapshot::begin_save(const std::string& what, uint64_t* save_id) {
  STRATA_RETURN_IF_ERROR(
      consensus_.same(Among::kEveryone, {{what, fnv1a(what.data(), what.size())}}, "checkpoint path"));
  *save_id = new_save_id();
  return consensus_.take_from_rank0(what, save_id);
}

Status Snapshot::write_weights(const strata_ckpt_save_args* args, const std::string& what, strata_ckpt_save** save) {
  for (uint32_t phase = 0; phase < 2; ++phase) {
    const Status mine = take_failure(checkpoint_.api()->export_weights(checkpoint_.self(), args, phase, save));
    STRATA_RETURN_IF_ERROR(end_phase(mine, what, *save));
  }
  return Ok();
}

// Where a phase failed on any rank, what was written goes away on all.
Status Snapshot::end_phase(const Status& mine, const std::string& what, strata_ckpt_save* save) {
  Status all = consensus_.all_ok(Among::kEveryone, mine, what);
  if (!all.ok() && save) checkpoint_.api()->abandon(checkpoint_.self(), save);
  return all;
}

// Rank 0 publishes; the others learn whether it did.
Status Snapshot::publish(const std::string& what, strata_ckpt_save* save) {
  return consensus_.all_ok(Among::kEveryone, take_failure(checkpoint_.api()->commit(checkpoint_.self(), save)), what);
}

// ---- loading -----------------------------------------------------------------------------------------------------

Status Snapshot::load(const std::string& root, const char* tag, Loaded* out, bool* changed) {
  const std::string what = "load of \"" + root + "/" + (tag ? tag : "(latest)") + "\"";
  STRATA_RETURN_IF_ERROR(
      consensus_.same(Among::kEveryone, {{what, fnv1a(what.data(), what.size())}}, "checkpoint path"));
  const auto* api = checkpoint_.api();
  strata_ckpt_load* load = nullptr;
  strata_ckpt_info info{};
  info.struct_size = sizeof(info);
  Loaded loaded;
  RunState& found = loaded.run;
  std::vector<uint64_t> places;
  std::string part_root, part_tag;
  Status mine = ModelParts::find(layout_.places, root, tag, &part_root, &part_tag);
  const char* name = part_root == root ? tag : part_tag.c_str();
  if (mine.ok()) mine = take_failure(api->load_open(checkpoint_.self(), part_root.c_str(), name, &load));
  if (mine.ok()) mine = take_failure(api->load_info(load, &info));
  if (mine.ok()) mine = load_run(info, &found);
  if (mine.ok()) mine = match_params(info, &places, &loaded.unread);
  Status all = found_alike(mine, what);
  if (all.ok()) all = consensus_.all_ok(Among::kEveryone, mine, what);
  const auto tag_hash = [&info] { return fnv1a(info.tag, std::strlen(info.tag)); };
  if (all.ok()) {  // a save that replaces it meanwhile would show some ranks the old one
    const std::vector<Consensus::Value> common = {{what + " (tag)", tag_hash()}, {what + " (save)", found.save_id}};
    all = consensus_.same(Among::kEveryone, common, what);
  }
  if (all.ok()) {
    *changed = true;  // nothing was up to here
    all = consensus_.all_ok(Among::kEveryone, load_tensors(load, places), what);
  }
  if (all.ok()) {
    loaded.path = part_root == root ? root + "/" + info.tag : part_root;
    loaded.world = info.world;
    *out = std::move(loaded);
  }
  if (load) api->load_close(load);
  return all;
}

// NOT_FOUND lets a run start anew, so no rank may see it where another one finds a checkpoint.
Status Snapshot::found_alike(const Status& mine, const std::string& what) {
  const uint64_t nothing = mine.code() == STRATA_NOT_FOUND ? 1 : 0;
  const Status alike = consensus_.same(Among::kEveryone, {{what + ": whether it is there", nothing}}, what);
  return alike.ok() || mine.ok() ? alike : Status(alike.code(), alike.text() + "; here: " + mine.text());
}

Status Snapshot::load_run(const strata_ckpt_info& info, RunState* run) const {
  RunState found;
  found.unit_steps.assign(registry_.units.size(), 0);
  std::unordered_map<std::string, size_t> units;
  for (size_t u = 0; u < registry_.units.size(); ++u) units[registry_.units[u].name] = u;
  for (uint64_t k = 0; k < info.meta_count; ++k) {
    const auto& o =
        *reinterpret_cast<const strata_option*>(reinterpret_cast<const char*>(info.meta) + k * info.meta_stride);
    const std::string key = o.key;
    if (key == kSaveId) found.save_id = static_cast<uint64_t>(o.i);
    if (key == "strata.steps") found.steps = static_cast<uint64_t>(o.i);
    if (key == "strata.applied_steps") found.applied = static_cast<uint64_t>(o.i);
    if (key == "strata.skipped_steps") found.skipped = static_cast<uint64_t>(o.i);
    if (starts_with(key, kUnitStep)) {
      const auto it = units.find(key.substr(sizeof(kUnitStep) - 1));
      if (it != units.end()) found.unit_steps[it->second] = static_cast<uint64_t>(o.i);
    }
    if (starts_with(key, kHostMeta)) found.meta[key.substr(sizeof(kHostMeta) - 1)] = o.s;
  }
  *run = std::move(found);
  return Ok();
}

// Finds every registered param in the checkpoint, and refuses what does not fit, before anything is read.
Status Snapshot::match_params(const strata_ckpt_info& info, std::vector<uint64_t>* places,
                              std::vector<std::string>* unread) const {
  auto param_at = [&info](uint64_t k) -> const strata_ckpt_param& {
    return *reinterpret_cast<const strata_ckpt_param*>(reinterpret_cast<const char*>(info.params) +
                                                       k * info.param_stride);
  };
  std::unordered_map<std::string, uint64_t> by_name;
  std::vector<bool> is_read(info.param_count);
  for (uint64_t k = 0; k < info.param_count; ++k) by_name[param_at(k).name] = k;
  places->assign(registry_.params.size(), 0);
  for (uint32_t id = 0; id < registry_.params.size(); ++id) {
    const Param& p = registry_.params[id];
    if (p.owner != id) continue;
    auto it = by_name.find(p.name);
    if (it != by_name.end() && param_at(it->second).alias_of) it = by_name.find(param_at(it->second).alias_of);
    if (it == by_name.end()) return {STRATA_INVALID_ARGUMENT, "param \"" + p.name + "\" is not in the checkpoint"};
    const strata_ckpt_param& saved = param_at(it->second);
    const auto ndim = static_cast<int32_t>(p.shape.size());
    if (saved.ndim != ndim || !std::equal(p.shape.begin(), p.shape.end(), saved.shape) || saved.dtype != p.dtype) {
      return {STRATA_INVALID_ARGUMENT, "param \"" + p.name + "\" is " + dtype_name(saved.dtype) +
                                           shape_text(saved.shape, saved.ndim) + " in the checkpoint and " +
                                           dtype_name(p.dtype) + shape_text(p.shape.data(), ndim) + " here"};
    }
    (*places)[id] = it->second;
    is_read[it->second] = true;
  }
  for (uint64_t k = 0; k < info.param_count; ++k) {
    if (!is_read[k] && !param_at(k).alias_of) unread->push_back(param_at(k).name);
  }
  return Ok();
}

Status Snapshot::load_tensors(strata_ckpt_load* load, const std::vector<uint64_t>& places) {
  for (uint32_t id = 0; id < registry_.params.size(); ++id) {
    const Param& p = registry_.params[id];
    if (p.owner != id) continue;
    const Status loaded = load_param(load, places[id], p).during("param \"" + p.name + "\"");
    if (loaded.code() == STRATA_NOT_FOUND) return {STRATA_INVALID_ARGUMENT, loaded.text()};  // an array of it
    STRATA_RETURN_IF_ERROR(loaded);
  }
  return Ok();
}

// Fills everything this rank holds of a param: the weight where it is kept whole, and its part of every array.
Status Snapshot::load_param(strata_ckpt_load* load, uint64_t index, const Param& p) {
  const Segment& s = layout_.units[p.home].segments[p.segment];
  const auto* api = checkpoint_.api();
  const Range owned = layout_.owned(s), mine = intersect(owned, {p.offset, p.offset + p.numel});
  std::vector<std::string> arrays = {"weight"};
  if (s.trainable) {
    const auto& optim = states_.layout_of(s);
    arrays.insert(arrays.end(), optim.canonical, optim.canonical + optim.canonical_count);
  }
  std::vector<char> buffer(std::min(kLoadElements, p.numel) * sizeof(float));
  for (uint64_t at = 0; layout_.is_whole(p.home) && at < p.numel; at += kLoadElements) {
    const uint64_t count = std::min(kLoadElements, p.numel - at);
    STRATA_RETURN_IF_ERROR(take_failure(api->load_read(load, index, "weight", at, count, buffer.data())));
    STRATA_RETURN_IF_ERROR(tensors_.import_whole(p.home, p.segment, p.offset + at, count, buffer.data()));
  }
  for (const std::string& array : arrays) {
    for (uint64_t at = mine.begin; at < mine.end; at += kLoadElements) {
      const uint64_t count = std::min(kLoadElements, mine.end - at);
      STRATA_RETURN_IF_ERROR(
          take_failure(api->load_read(load, index, array.c_str(), at - p.offset, count, buffer.data())));
      STRATA_RETURN_IF_ERROR(tensors_.import_owned(p.home, p.segment, array, at - owned.begin, count, buffer.data()));
    }
  }
  return weights_.invalidate(p.home);
}

}  // namespace strata

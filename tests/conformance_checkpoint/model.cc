#include "tests/conformance_checkpoint/model.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace strata::test {

uint64_t dtype_bytes(strata_dtype dtype) {
  switch (dtype) {
    case STRATA_U8:
      return 1;
    case STRATA_BF16:
    case STRATA_F16:
    case STRATA_U16:
      return 2;
    case STRATA_F32:
      return 4;
    default:
      return 8;
  }
}

uint64_t ParamSpec::elements() const {
  uint64_t n = 1;
  for (int64_t d : shape) n *= static_cast<uint64_t>(d);
  return n;
}

uint64_t Model::segment(const std::string& name, std::vector<ArraySpec> arrays) {
  segments.push_back({name, std::move(arrays), 0, {}});
  return segments.size() - 1;
}

void Model::param(uint64_t segment, const std::string& name, std::vector<int64_t> shape) {
  SegmentSpec& s = segments[segment];
  ParamSpec p{name, s.arrays[0].dtype, std::move(shape), segment, s.elements, "", false};
  s.elements += (p.elements() + 127) / 128 * 128;
  params.push_back(std::move(p));
}

void Model::alias(const std::string& name, const std::string& of) {
  for (const ParamSpec& p : params) {
    if (p.name != of) continue;
    params.push_back({name, p.dtype, p.shape, STRATA_NO_SEGMENT, 0, of, true});
    return;
  }
  ADD_FAILURE() << "no param " << of;
}

namespace {
strata_option option(strata_option_type type) {
  strata_option o{};
  o.struct_size = sizeof(o);
  o.type = type;
  return o;
}
}  // namespace

void Model::meta(const std::string& key, int64_t value) {
  metas.push_back({key, "", option(STRATA_OPT_INT)});
  metas.back().option.i = value;
}
void Model::meta_bool(const std::string& key, bool value) {
  metas.push_back({key, "", option(STRATA_OPT_BOOL)});
  metas.back().option.i = value;
}
void Model::meta(const std::string& key, double value) {
  metas.push_back({key, "", option(STRATA_OPT_FLOAT)});
  metas.back().option.f = value;
}
void Model::meta(const std::string& key, const std::string& value) {
  metas.push_back({key, value, option(STRATA_OPT_STRING)});
}

void Model::shard(int world) {
  world_ = world;
  const uint64_t unit = 2048 * static_cast<uint64_t>(world);
  for (SegmentSpec& s : segments) {
    s.elements = std::max<uint64_t>(1, (s.elements + unit - 1) / unit) * unit;
    s.owned.clear();
    const uint64_t slice = s.elements / static_cast<uint64_t>(world);
    for (int r = 0; r < world; ++r) s.owned.push_back({slice * static_cast<uint64_t>(r), slice});
  }
}

uint64_t Model::bits(uint64_t segment, uint64_t array, uint64_t element) const {
  return element * 2654435761u + segment * 977 + array * 131 + seed_ * 7919;
}

void Model::fill(uint64_t segment, uint64_t array, uint64_t offset, uint64_t count, void* out) const {
  const uint64_t size = dtype_bytes(segments[segment].arrays[array].dtype);
  auto* p = static_cast<char*>(out);
  for (uint64_t k = 0; k < count; ++k) {
    const uint64_t b = bits(segment, array, offset + k);
    std::memcpy(p + k * size, &b, size);
  }
}

const ParamSpec& Model::owner_of(const ParamSpec& p) const {
  if (!p.is_alias) return p;
  return *std::find_if(params.begin(), params.end(), [&](const ParamSpec& q) { return q.name == p.alias_of; });
}

uint64_t Model::shard_bytes(int rank) const {
  uint64_t bytes = 0;
  for (const SegmentSpec& s : segments) {
    for (const ArraySpec& a : s.arrays) bytes += s.owned[static_cast<size_t>(rank)].second * dtype_bytes(a.dtype);
  }
  return bytes;
}

Model ordinary_model(uint64_t seed) {
  Model m(seed);
  const auto bf16 =
      m.segment("layer0/bf16",
                {{"weight", STRATA_BF16}, {"master", STRATA_F32}, {"exp_avg", STRATA_F32}, {"exp_avg_sq", STRATA_F32}});
  m.param(bf16, "layers.0/attn/weight", {57, 133});
  m.param(bf16, "layers.0/attn/bias", {7});
  m.param(bf16, "nothing", {0, 4});
  m.param(bf16, "scale", {});
  m.param(bf16, "cube", {5, 3, 701});
  const auto f32 = m.segment("layer1/f32", {{"weight", STRATA_F32}, {"exp_avg", STRATA_F32}});
  m.param(f32, "wide", {600, 1001});
  m.param(f32, "tail", {3});
  const auto f16 = m.segment("resident/f16", {{"weight", STRATA_F16}});
  m.param(f16, "frozen", {100, 8});
  m.param(f16, "a", {5, 3});
  m.param(f16, "a/b", {2});
  m.param(f16, "a//c", {2});
  m.param(f16, "./..", {2});
  m.param(f16, "100% \xC3\xBC\x01", {2});
  m.alias("tied", "a");
  m.alias("tied/too", "layers.0/attn/weight");
  m.meta("step", int64_t{1} << 60);
  m.meta("lr", 1e-3);
  m.meta_bool("resumed", true);
  m.meta("manifest", std::string("[plugin]\nx = \"\xC3\xBC\"\n"));
  m.meta("save_id", static_cast<int64_t>(seed));
  return m;
}

Model small_model(uint64_t seed, int world) {
  Model m(seed);
  const auto s = m.segment("u/bf16", {{"weight", STRATA_BF16}, {"master", STRATA_F32}});
  m.param(s, "w", {57, 133});
  m.param(s, "empty", {0, 4});
  m.meta("save_id", static_cast<int64_t>(seed));
  m.shard(world);
  return m;
}

SaveArgs::SaveArgs(const Model& model, const std::string& root, const std::string& tag, int rank)
    : model_(model), root_(root), tag_(tag), rank_(rank) {
  for (const SegmentSpec& s : model.segments) {
    arrays_.emplace_back();
    for (const ArraySpec& a : s.arrays)
      arrays_.back().push_back({sizeof(strata_ckpt_array), 0, a.name.c_str(), a.dtype, 0});
    const auto owned = s.owned[static_cast<size_t>(rank)];
    segments_.push_back({sizeof(strata_ckpt_segment), 0, s.name.c_str(), s.elements, owned.first, owned.second,
                         arrays_.back().data(), arrays_.back().size(), sizeof(strata_ckpt_array)});
  }
  for (const ParamSpec& p : model.params) {
    params_.push_back({sizeof(strata_ckpt_param), 0, p.name.c_str(), p.dtype, static_cast<int32_t>(p.shape.size()),
                       p.shape.data(), p.segment, p.offset, p.is_alias ? p.alias_of.c_str() : nullptr});
  }
  for (const Model::MetaSpec& m : model.metas) {
    strata_option o = m.option;
    o.key = m.key.c_str();
    o.s = m.text.c_str();
    meta_.push_back(o);
  }
  c.struct_size = sizeof(c);
  c.root = root_.c_str();
  c.tag = tag_.c_str();
  c.rank = rank;
  c.world = model.world();
  c.segments = segments_.data();
  c.segment_count = segments_.size();
  c.segment_stride = sizeof(strata_ckpt_segment);
  c.params = params_.data();
  c.param_count = params_.size();
  c.param_stride = sizeof(strata_ckpt_param);
  c.meta = meta_.data();
  c.meta_count = meta_.size();
  c.meta_stride = sizeof(strata_option);
  c.read = read;
  c.read_ctx = this;
}

strata_status STRATA_CALL SaveArgs::read(void* self, uint64_t segment, uint64_t array, uint64_t offset, uint64_t count,
                                         void* dst) {
  auto& args = *static_cast<SaveArgs*>(self);
  if (args.calls++ >= args.fail_at) return args.fail_with;
  const auto owned = args.model_.segments[segment].owned[static_cast<size_t>(args.rank_)];
  if (offset < owned.first || offset + count > owned.first + owned.second) return STRATA_OUT_OF_RANGE;
  args.model_.fill(segment, array, offset, count, dst);
  return STRATA_OK;
}

Instance::Instance(int r, int world, Options* options)
    : api(load<strata_checkpoint_api>("checkpoint", STRATA_CHECKPOINT)), rank(std::make_unique<Rank>(r, world)) {
  const strata_open_args args = rank->args(options);
  const strata_status code = api->open(&args, &self);
  if (code != STRATA_OK) ADD_FAILURE() << failure_text(code);
}

Instance::~Instance() { api->close(self); }

std::string failure_text(strata_status code) { return take_failure(code).text(); }

TempDir::TempDir()
    : path([] {
        const char* base = std::getenv("TMPDIR");
        std::string name = std::string(base ? base : "/tmp") + "/strata_ckpt_XXXXXX";
        return std::string(::mkdtemp(name.data()));
      }()) {}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

namespace {

using Saves = std::vector<strata_ckpt_save*>;

strata_status export_phases(const Instance& instance, const Model& model, const std::string& root,
                            const std::string& name, Saves* saves) {
  strata_status code = STRATA_OK;
  for (uint32_t phase = 0; phase < 2; ++phase) {
    for (int r = 0; r < model.world() && code == STRATA_OK; ++r) {
      SaveArgs args(model, root, name, r);
      code = instance.api->export_weights(instance.self, &args.c, phase, &(*saves)[static_cast<size_t>(r)]);
    }
  }
  return code;
}

// Commits on every rank; abandons where something went wrong.
strata_status end(const Instance& instance, const Saves& saves, strata_status code) {
  for (strata_ckpt_save* s : saves) {
    if (code != STRATA_OK) {
      if (s) instance.api->abandon(instance.self, s);
    } else if (const strata_status c = instance.api->commit(instance.self, s); c != STRATA_OK) {
      code = c;
    }
  }
  return code;
}

}  // namespace

strata_status save(const Model& model, const std::string& root, const std::string& tag, bool weights) {
  Instance instance(0, model.world());
  Saves saves(static_cast<size_t>(model.world()), nullptr);
  strata_status code = STRATA_OK;
  for (int r = 0; r < model.world() && code == STRATA_OK; ++r) {
    SaveArgs args(model, root, tag, r);
    code = instance.api->write(instance.self, &args.c, &saves[static_cast<size_t>(r)]);
  }
  if (weights && code == STRATA_OK) code = export_phases(instance, model, root, tag, &saves);
  return end(instance, saves, code);
}

strata_status export_file(const Model& model, const std::string& root, const std::string& file) {
  Instance instance(0, model.world());
  Saves saves(static_cast<size_t>(model.world()), nullptr);
  return end(instance, saves, export_phases(instance, model, root, file, &saves));
}

namespace {

std::string differs(const std::string& what, const std::string& where) { return where + ": " + what; }

std::string compare_param(const strata_ckpt_param& got, const ParamSpec& want) {
  if (got.name != want.name) return differs("name", want.name);
  if (got.dtype != want.dtype) return differs("dtype", want.name);
  if (std::vector<int64_t>(got.shape, got.shape + got.ndim) != want.shape) return differs("shape", want.name);
  if ((got.alias_of != nullptr) != want.is_alias) return differs("alias", want.name);
  if (want.is_alias && got.alias_of != want.alias_of) return differs("owner", want.name);
  if (got.segment != want.segment || (!want.is_alias && got.offset != want.offset)) return differs("place", want.name);
  return "";
}

std::string compare_meta(const strata_option& got, const Model::MetaSpec& want) {
  if (got.key != want.key || got.type != want.option.type) return differs("key or type", want.key);
  if (got.i != want.option.i) return differs("integer", want.key);
  if (std::memcmp(&got.f, &want.option.f, sizeof(double)) != 0) return differs("float bits", want.key);
  if (got.type == STRATA_OPT_STRING && got.s != want.text) return differs("text", want.key);
  return "";
}

std::string compare_data(const Instance& instance, strata_ckpt_load* load, const Model& model, size_t index, int cuts) {
  const ParamSpec& p = model.owner_of(model.params[index]);
  const SegmentSpec& s = model.segments[p.segment];
  for (size_t a = 0; a < s.arrays.size(); ++a) {
    const uint64_t size = dtype_bytes(s.arrays[a].dtype), n = p.elements();
    std::vector<char> got(n * size), want(n * size);
    for (int c = 0; c < cuts; ++c) {
      const uint64_t from = n * static_cast<uint64_t>(c) / static_cast<uint64_t>(cuts);
      const uint64_t to = n * static_cast<uint64_t>(c + 1) / static_cast<uint64_t>(cuts);
      const strata_status code =
          instance.api->load_read(load, index, s.arrays[a].name.c_str(), from, to - from, got.data() + from * size);
      if (code != STRATA_OK) return failure_text(code);
    }
    model.fill(p.segment, a, p.offset, n, want.data());
    if (got != want) return differs("bits of " + s.arrays[a].name, p.name);
  }
  return "";
}

std::string compare(const Instance& instance, strata_ckpt_load* load, const Model& model, int cuts) {
  strata_ckpt_info info{};
  info.struct_size = sizeof(info);
  if (instance.api->load_info(load, &info) != STRATA_OK) return "load_info failed";
  if (info.world != model.world()) return "world";
  if (info.param_count != model.params.size()) return "number of params";
  if (info.meta_count != model.metas.size()) return "number of meta values";
  for (size_t k = 0; k < model.metas.size(); ++k) {
    if (std::string e = compare_meta(info.meta[k], model.metas[k]); !e.empty()) return "meta " + e;
  }
  for (size_t k = 0; k < model.params.size(); ++k) {
    if (std::string e = compare_param(info.params[k], model.params[k]); !e.empty()) return "param " + e;
    if (std::string e = compare_data(instance, load, model, k, cuts); !e.empty()) return e;
  }
  return "";
}

}  // namespace

std::string difference(const Model& model, const std::string& root, const char* tag, int cuts, Options* options) {
  Instance instance(0, 1, options);
  strata_ckpt_load* load = nullptr;
  const strata_status code = instance.api->load_open(instance.self, root.c_str(), tag, &load);
  if (code != STRATA_OK) return failure_text(code);
  const std::string result = compare(instance, load, model, cuts);
  instance.api->load_close(load);
  return result;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

}  // namespace strata::test

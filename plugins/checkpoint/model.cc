#include "model.h"

#include <algorithm>
#include <cstdio>
#include <unordered_map>
#include <unordered_set>

#include "describe.h"
#include "names.h"

namespace strata::checkpoint {
namespace {

constexpr DType kDTypes[] = {{STRATA_F32, "F32", 4}, {STRATA_BF16, "BF16", 2}, {STRATA_F16, "F16", 2},
                             {STRATA_U8, "U8", 1},   {STRATA_U16, "U16", 2},   {STRATA_I64, "I64", 8},
                             {STRATA_F64, "F64", 8}};
constexpr uint64_t kMostElements = uint64_t{1} << 59;  // so that bytes stay below 2^63
constexpr uint64_t kOwnedUnit = 2048;
constexpr int32_t kMostDims = 32;  // HDF5's limit
constexpr char kWeightsEnding[] = ".weights.h5";

template <class T>
const T& element(const T* items, uint64_t stride, uint64_t k) {
  return *reinterpret_cast<const T*>(reinterpret_cast<const char*>(items) + k * stride);
}

std::string required(const char* text, const char* what) {
  if (!text) raise(STRATA_INVALID_ARGUMENT, what, " is NULL");
  return text;
}

Segment copy_segment(const strata_ckpt_segment& in) {
  if (!STRATA_HAS(&in, strata_ckpt_segment, array_stride)) {
    raise(STRATA_INVALID_ARGUMENT, "a segment's struct_size is ", in.struct_size, ", too short for this ABI");
  }
  Segment out;
  out.name = required(in.name, "a segment's name");
  out.elements = in.elements;
  out.owned.push_back({in.owned_offset, in.owned_count});
  const std::string path = escape_path(out.name);
  for (uint64_t k = 0; k < in.array_count; ++k) {
    const auto& a = element(in.arrays, in.array_stride, k);
    const std::string name = required(a.name, "an array's name");
    out.arrays.push_back({name, a.dtype, path + "/" + escape_component(name)});
  }
  return out;
}

Param copy_param(const strata_ckpt_param& in) {
  if (!STRATA_HAS(&in, strata_ckpt_param, alias_of)) {
    raise(STRATA_INVALID_ARGUMENT, "a param's struct_size is ", in.struct_size, ", too short for this ABI");
  }
  Param out;
  out.name = required(in.name, "a param's name");
  out.path = escape_path(out.name);
  out.dtype = in.dtype;
  if (in.ndim < 0 || in.ndim > kMostDims || (in.ndim > 0 && !in.shape)) {
    raise(STRATA_INVALID_ARGUMENT, "param '", out.name, "' has ", in.ndim, " dimensions; 0 to ", kMostDims);
  }
  if (in.ndim > 0) out.shape.assign(in.shape, in.shape + in.ndim);
  out.is_alias = in.alias_of != nullptr;
  if (out.is_alias) {
    out.alias_of = in.alias_of;
  } else {
    out.segment = in.segment;
    out.offset = in.offset;
  }
  return out;
}

Meta copy_meta(const strata_option& in) {
  if (!STRATA_HAS(&in, strata_option, s)) {
    raise(STRATA_INVALID_ARGUMENT, "a meta value's struct_size is ", in.struct_size, ", too short for this ABI");
  }
  Meta out;
  out.key = required(in.key, "a meta key");
  out.type = in.type;
  switch (in.type) {
    case STRATA_OPT_BOOL:
    case STRATA_OPT_INT:
      out.i = in.i;
      break;
    case STRATA_OPT_FLOAT:
      out.f = in.f;
      break;
    case STRATA_OPT_STRING:
      out.s = required(in.s, "a meta string");
      break;
    default:
      raise(STRATA_INVALID_ARGUMENT, "meta '", out.key, "' has the unknown type ", in.type);
  }
  return out;
}

void resolve_paths(Description& d) {
  std::vector<std::string*> params, arrays;
  for (Param& p : d.params) params.push_back(&p.path);
  for (Segment& s : d.segments) {
    for (Array& a : s.arrays) arrays.push_back(&a.path);
  }
  resolve_prefixes(params);
  resolve_prefixes(arrays);
}

// The reasons of one check, with what they are about in front.
struct Complaint {
  strata_status code;
  const std::string& where;
  template <class... Parts>
  [[noreturn]] void operator()(const Parts&... parts) const {
    raise(code, where, ": ", parts...);
  }
};

void check_segment(const Segment& s, const Complaint& complain) {
  if (s.elements > kMostElements) complain("segment '", s.name, "' has ", s.elements, " elements");
  for (const Array& a : s.arrays) {
    if (!find_dtype(a.dtype)) complain("array '", a.name, "' of segment '", s.name, "' has unknown dtype ", a.dtype);
    if (a.name == "strata") complain("array name 'strata' of segment '", s.name, "' is reserved");
  }
  for (const Range& r : s.owned) {
    if (r.offset > s.elements || r.count > s.elements - r.offset) {
      complain("segment '", s.name, "': owned elements [", r.offset, ", +", r.count, ") of ", s.elements);
    }
    if (r.offset % kOwnedUnit || r.count % kOwnedUnit) {
      complain("segment '", s.name, "': owned elements [", r.offset, ", +", r.count, ") are not multiples of ",
               kOwnedUnit);
    }
  }
}

void check_param(Param& p, const std::vector<Segment>& segments, const Complaint& complain) {
  if (!find_dtype(p.dtype)) complain("param '", p.name, "' has unknown dtype ", p.dtype);
  p.elements = 1;
  for (int64_t dim : p.shape) {
    if (dim < 0 || __builtin_mul_overflow(p.elements, static_cast<uint64_t>(dim), &p.elements) ||
        p.elements > kMostElements) {
      complain("param '", p.name, "': dimension ", dim, " is negative or makes the param too large");
    }
  }
  if (p.is_alias) return;
  if (p.segment >= segments.size()) {
    complain("param '", p.name, "' names segment ", p.segment, " of ", segments.size());
  }
  const Segment& s = segments[p.segment];
  if (p.offset > s.elements || p.elements > s.elements - p.offset) {
    complain("param '", p.name, "': elements [", p.offset, ", +", p.elements, ") of segment '", s.name, "' with ",
             s.elements);
  }
  const Array* weight = s.find_array(kWeight);
  if (weight && weight->dtype != p.dtype) {
    complain("param '", p.name, "' is ", find_dtype(p.dtype)->name, " but 'weight' of its segment '", s.name, "' is ",
             find_dtype(weight->dtype)->name);
  }
}

void resolve_aliases(std::vector<Param>& params, const Complaint& complain) {
  std::unordered_map<std::string, size_t> by_name;
  std::unordered_set<std::string> paths;
  for (size_t k = 0; k < params.size(); ++k) {
    if (!by_name.emplace(params[k].name, k).second) complain("two params are named '", params[k].name, "'");
    if (!paths.insert(params[k].path).second) complain("two params have the path '", params[k].path, "'");
    params[k].owner = k;
  }
  for (Param& p : params) {
    if (!p.is_alias) continue;
    const auto found = by_name.find(p.alias_of);
    if (found == by_name.end() || params[found->second].is_alias) {
      complain("param '", p.name, "' is an alias of '", p.alias_of, "', which is not a param with storage of its own");
    }
    p.owner = found->second;
    if (params[p.owner].shape != p.shape || params[p.owner].dtype != p.dtype) {
      complain("param '", p.name, "' and its owner '", p.alias_of, "' differ in shape or dtype");
    }
  }
}

}  // namespace

const DType* find_dtype(strata_dtype id) {
  for (const DType& t : kDTypes) {
    if (t.id == id) return &t;
  }
  return nullptr;
}

const DType* find_dtype(const std::string& name) {
  for (const DType& t : kDTypes) {
    if (name == t.name) return &t;
  }
  return nullptr;
}

const Array* Segment::find_array(const std::string& array) const {
  for (const Array& a : arrays) {
    if (a.name == array) return &a;
  }
  return nullptr;
}

void Description::check(strata_status code, const std::string& where) {
  const Complaint complain{code, where};
  if (world < 1 || world > 99999 || rank < 0 || rank >= world) complain("rank ", rank, " of world ", world);
  std::unordered_set<std::string> paths;
  for (const Segment& s : segments) {
    check_segment(s, complain);
    for (const Array& a : s.arrays) {
      if (!paths.insert(a.path).second) complain("two arrays have the path '", a.path, "'");
    }
  }
  for (Param& p : params) check_param(p, segments, complain);
  resolve_aliases(params, complain);
}

void Description::check_owned(strata_status code, const std::string& where) const {
  const Complaint complain{code, where};
  for (const Segment& s : segments) {
    if (s.owned.size() != static_cast<size_t>(world)) {
      complain("segment '", s.name, "' has ", s.owned.size(), " owners for a world of ", world);
    }
  }
  const auto owners = owners_in_order();
  std::vector<std::vector<Range>> covered(segments.size());  // adjacent ranges joined
  for (size_t k = 0; k < segments.size(); ++k) {
    auto& runs = covered[k];
    for (size_t r : owners[k]) {
      const Range& range = segments[k].owned[r];
      if (!runs.empty() && range.offset < runs.back().end()) {
        complain("segment '", segments[k].name, "': rank ", r, " and another own element ", range.offset);
      }
      if (!runs.empty() && range.offset == runs.back().end()) {
        runs.back().count += range.count;
      } else {
        runs.push_back(range);
      }
    }
  }
  for (const Param& p : params) {
    if (p.is_alias || p.elements == 0) continue;
    const auto& runs = covered[p.segment];
    const bool whole = std::any_of(runs.begin(), runs.end(), [&](const Range& r) {
      return r.offset <= p.offset && p.offset + p.elements <= r.end();
    });
    if (!whole) complain("no rank owns some elements of param '", p.name, "'");
  }
}

std::vector<std::vector<size_t>> Description::owners_in_order() const {
  std::vector<std::vector<size_t>> out(segments.size());
  for (size_t k = 0; k < segments.size(); ++k) {
    const auto& owned = segments[k].owned;
    for (size_t r = 0; r < owned.size(); ++r) {
      if (owned[r].count) out[k].push_back(r);
    }
    std::sort(out[k].begin(), out[k].end(), [&](size_t a, size_t b) { return owned[a].offset < owned[b].offset; });
  }
  return out;
}

Description from_args(const strata_ckpt_save_args& args) {
  if (!STRATA_HAS(&args, strata_ckpt_save_args, read_ctx)) {
    raise(STRATA_INVALID_ARGUMENT, "args.struct_size is ", args.struct_size, ", too short for this ABI");
  }
  if (!args.root || !*args.root) raise(STRATA_INVALID_ARGUMENT, "root is missing");
  if (!args.read) raise(STRATA_INVALID_ARGUMENT, "the read callback is NULL");
  const std::string name = args.tag ? args.tag : "";
  if (const std::string why = why_not_a_name(name); !why.empty()) {
    raise(STRATA_INVALID_ARGUMENT, "name '", name, "' ", why);
  }
  Description d;
  d.tag = args.tag;
  d.rank = args.rank;
  d.world = args.world;
  for (uint64_t k = 0; k < args.segment_count; ++k) {
    d.segments.push_back(copy_segment(element(args.segments, args.segment_stride, k)));
  }
  for (uint64_t k = 0; k < args.param_count; ++k) {
    d.params.push_back(copy_param(element(args.params, args.param_stride, k)));
  }
  for (uint64_t k = 0; k < args.meta_count; ++k) {
    d.meta.push_back(copy_meta(element(args.meta, args.meta_stride, k)));
  }
  resolve_paths(d);
  d.check(STRATA_INVALID_ARGUMENT, join("'", d.tag, "' on rank ", d.rank));
  d.fingerprint = fingerprint(d);
  return d;
}

std::string why_not_a_name(const std::string& name) {
  const auto is_space = [](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); };
  const auto is_control = [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; };
  if (name.empty() || name.size() > 200) return join("has ", name.size(), " bytes, 1 to 200 are allowed");
  if (name[0] == '.') return "begins with a dot, as the files of a save in progress do";
  if (name.find('/') != std::string::npos) return "has a '/', it must be one path component";
  if (std::all_of(name.begin(), name.end(), is_space)) return "is blank";
  if (is_space(name.front()) || is_space(name.back())) return "begins or ends with white space";
  if (std::any_of(name.begin(), name.end(), is_control)) return "has a control character";
  if (name == "latest") return "is the name of the file that names the newest checkpoint";
  return "";
}

void check_tag(const char* tag) {
  const std::string t = tag ? tag : "";
  std::string why = why_not_a_name(t);
  if (why.empty() && t.ends_with(kWeightsEnding)) why = join("ends with '", kWeightsEnding, "', as weight files do");
  if (!why.empty()) raise(STRATA_INVALID_ARGUMENT, "tag '", t, "' ", why);
}

std::string rank_file_name(int32_t rank) {
  char name[32];
  std::snprintf(name, sizeof(name), "rank%05d.h5", rank);
  return name;
}

}  // namespace strata::checkpoint

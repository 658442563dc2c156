#include "describe.h"

#include <xxhash.h>

#include <cstdio>
#include <nlohmann/json.hpp>

namespace strata::checkpoint {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

const char* type_name(strata_option_type type) {
  switch (type) {
    case STRATA_OPT_BOOL:
      return "bool";
    case STRATA_OPT_INT:
      return "int";
    case STRATA_OPT_FLOAT:
      return "float";
    default:
      return "string";
  }
}

ordered_json segment_json(const Segment& s, bool ownership) {
  ordered_json arrays = ordered_json::array();
  for (const Array& a : s.arrays) {
    arrays.push_back({{"name", a.name}, {"dtype", find_dtype(a.dtype)->name}, {"path", a.path}});
  }
  ordered_json out = {{"name", s.name}, {"elements", s.elements}, {"arrays", std::move(arrays)}};
  if (ownership) {
    ordered_json owned = ordered_json::array();
    for (const Range& r : s.owned) owned.push_back(ordered_json::array({r.offset, r.count}));
    out["owned"] = std::move(owned);
  }
  return out;
}

ordered_json param_json(const Param& p) {
  ordered_json out = {{"name", p.name}, {"path", p.path}, {"dtype", find_dtype(p.dtype)->name}, {"shape", p.shape}};
  if (p.is_alias) {
    out["alias_of"] = p.alias_of;
  } else {
    out["segment"] = p.segment;
    out["offset"] = p.offset;
  }
  return out;
}

ordered_json meta_json(const Meta& m) {
  ordered_json out = {{"key", m.key}, {"type", type_name(m.type)}};
  if (m.type == STRATA_OPT_BOOL) {
    out["value"] = m.i != 0;
  } else if (m.type == STRATA_OPT_INT) {
    out["value"] = m.i;
  } else if (m.type == STRATA_OPT_FLOAT) {
    uint64_t bits;
    std::memcpy(&bits, &m.f, sizeof(bits));
    out["value"] = m.f;  // null when not finite
    out["bits"] = bits;
  } else {
    out["value"] = m.s;
  }
  return out;
}

template <class Items, class Convert>
ordered_json list(const Items& items, Convert convert) {
  ordered_json out = ordered_json::array();
  for (const auto& item : items) out.push_back(convert(item));
  return out;
}

Segment parse_segment(const ordered_json& in) {
  Segment s;
  s.name = in.at("name").get<std::string>();
  s.elements = in.at("elements").get<uint64_t>();
  for (const auto& a : in.at("arrays")) {
    const DType* dtype = find_dtype(a.at("dtype").get<std::string>());
    s.arrays.push_back({a.at("name").get<std::string>(), dtype ? dtype->id : 0, a.at("path").get<std::string>()});
  }
  for (const auto& r : in.at("owned")) s.owned.push_back({r.at(0).get<uint64_t>(), r.at(1).get<uint64_t>()});
  return s;
}

Param parse_param(const ordered_json& in) {
  Param p;
  p.name = in.at("name").get<std::string>();
  p.path = in.at("path").get<std::string>();
  const DType* dtype = find_dtype(in.at("dtype").get<std::string>());
  p.dtype = dtype ? dtype->id : 0;
  p.shape = in.at("shape").get<std::vector<int64_t>>();
  p.is_alias = in.contains("alias_of");
  if (p.is_alias) {
    p.alias_of = in.at("alias_of").get<std::string>();
  } else {
    p.segment = in.at("segment").get<uint64_t>();
    p.offset = in.at("offset").get<uint64_t>();
  }
  return p;
}

Meta parse_meta(const ordered_json& in) {
  Meta m;
  m.key = in.at("key").get<std::string>();
  const std::string type = in.at("type").get<std::string>();
  if (type == "bool") {
    m.type = STRATA_OPT_BOOL;
    m.i = in.at("value").get<bool>() ? 1 : 0;
  } else if (type == "int") {
    m.type = STRATA_OPT_INT;
    m.i = in.at("value").get<int64_t>();
  } else if (type == "float") {
    m.type = STRATA_OPT_FLOAT;
    const auto bits = in.at("bits").get<uint64_t>();
    std::memcpy(&m.f, &bits, sizeof(bits));
  } else if (type == "string") {
    m.s = in.at("value").get<std::string>();
  } else {
    raise(STRATA_DATA_LOSS, "meta '", m.key, "' has the unknown type '", type, "'");
  }
  return m;
}

Description parse(const ordered_json& in, const std::string& format) {
  Description d;
  d.format = in.at("format").get<std::string>();
  if (d.format != format) raise(STRATA_DATA_LOSS, "the format is '", d.format, "', expected '", format, "'");
  d.fingerprint = in.at("fingerprint").get<uint64_t>();
  d.tag = in.at("tag").get<std::string>();
  d.world = in.at("world").get<int32_t>();
  d.rank = in.value("rank", 0);
  for (const auto& s : in.at("segments")) d.segments.push_back(parse_segment(s));
  if (d.format == kRankFormat) return d;
  for (const auto& f : in.at("files")) {
    d.files.push_back({f.at("file").get<std::string>(), f.at("bytes").get<uint64_t>()});
  }
  for (const auto& p : in.at("params")) d.params.push_back(parse_param(p));
  for (const auto& m : in.at("meta")) d.meta.push_back(parse_meta(m));
  return d;
}

std::string dump(const ordered_json& j) {
  try {
    return j.dump();
  } catch (const nlohmann::json::exception& e) {  // only for text that is not UTF-8
    raise(STRATA_INVALID_ARGUMENT, "a name or meta text is not UTF-8: ", e.what());
  }
}

}  // namespace

uint64_t fingerprint(const Description& d) {
  const ordered_json agreed = {{"tag", d.tag},
                               {"world", d.world},
                               {"segments", list(d.segments, [](const Segment& s) { return segment_json(s, false); })},
                               {"params", list(d.params, param_json)},
                               {"meta", list(d.meta, meta_json)}};
  const std::string text = dump(agreed);
  return XXH3_64bits(text.data(), text.size());
}

std::string to_json(const Description& d) {
  ordered_json out = {{"format", d.format}, {"fingerprint", d.fingerprint}, {"tag", d.tag}, {"world", d.world}};
  if (d.format == kRankFormat) out["rank"] = d.rank;
  out["segments"] = list(d.segments, [](const Segment& s) { return segment_json(s, true); });
  if (d.format == kRankFormat) return dump(out);
  out["files"] = list(d.files, [](const RankFile& f) { return ordered_json{{"file", f.file}, {"bytes", f.bytes}}; });
  out["params"] = list(d.params, param_json);
  out["meta"] = list(d.meta, meta_json);
  return dump(out);
}

Description from_json(const std::string& text, const std::string& format, const std::string& where) {
  try {
    Description d = parse(ordered_json::parse(text), format);
    if (d.format == kIndexFormat) d.check(STRATA_DATA_LOSS, "its description");
    return d;
  } catch (const std::exception& e) {
    raise(STRATA_DATA_LOSS, where, ": ", e.what());
  }
}

std::string safetensors_header(const std::vector<TensorSpan>& spans, const std::vector<Param>& params) {
  json metadata = {{"format", "pt"}};
  for (const Param& p : params) {
    if (p.name == "__metadata__" || p.name.rfind("__hdf5_", 0) == 0) {
      raise(STRATA_INVALID_ARGUMENT, "a param cannot be named '", p.name, "' in a weight file");
    }
    if (p.is_alias) metadata[p.name] = p.alias_of;
  }
  json header = {{"__metadata__", std::move(metadata)}};
  int fillers = 0;
  for (const TensorSpan& span : spans) {
    const json where = json::array({span.offset, span.offset + span.bytes});
    if (span.param) {
      header[span.param->name] = {
          {"dtype", find_dtype(span.param->dtype)->name}, {"shape", span.param->shape}, {"data_offsets", where}};
    } else {
      char name[32];
      std::snprintf(name, sizeof(name), "__hdf5_%05d__", fillers++);
      header[name] = {{"dtype", "U8"}, {"shape", json::array({span.bytes})}, {"data_offsets", where}};
    }
  }
  return header.dump();
}

}  // namespace strata::checkpoint

// index.cc - rank 0's commit: looks at every rank's file, writes index.h5 over them, and publishes the directory.
//
// Rank 0 learns the others' ownership from their files, so nothing has to be sent between ranks. It refuses what is
// not of this save (fingerprint), not whole, or does not cover every param. Params become virtual datasets: a rank's
// piece of a param is a flat range, cut into the fewest boxes of the param's shape.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <set>

#include "describe.h"
#include "latest.h"
#include "names.h"
#include "replace.h"
#include "save.h"

namespace strata::checkpoint {
namespace {

struct Box {
  uint64_t flat;  // its first element, counted in the param
  std::vector<hsize_t> start, count;
};

// Cuts the flat range [begin, end) of a row-major tensor into at most 2 * ndim - 1 boxes. `box` has the coordinates of
// dimensions before `dim` set (count 1), the later ones whole; `flat` is the first element of that sub-tensor.
void cut(const std::vector<int64_t>& shape, size_t dim, uint64_t flat, uint64_t begin, uint64_t end, Box box,
         std::vector<Box>& out) {
  uint64_t inner = 1;
  for (size_t k = dim + 1; k < shape.size(); ++k) inner *= static_cast<uint64_t>(shape[k]);
  const auto row = [&](uint64_t r, uint64_t from, uint64_t to) {  // part of one row: one dimension further in
    Box part = box;
    part.start[dim] = r;
    part.count[dim] = 1;
    cut(shape, dim + 1, flat + r * inner, from, to, part, out);
  };
  const uint64_t first = begin / inner, last = (end - 1) / inner;
  if (first == last && end - begin < inner) return row(first, begin % inner, (end - 1) % inner + 1);
  const uint64_t whole = (begin + inner - 1) / inner, whole_end = end / inner;
  if (begin % inner) row(first, begin % inner, inner);
  if (whole < whole_end) {
    Box rows = box;
    rows.flat = flat + whole * inner;
    rows.start[dim] = whole;
    rows.count[dim] = whole_end - whole;
    out.push_back(rows);
  }
  if (end % inner) row(last, 0, end % inner);
}

std::vector<Box> boxes(const std::vector<int64_t>& shape, uint64_t begin, uint64_t end) {
  Box all{0, std::vector<hsize_t>(shape.size(), 0), std::vector<hsize_t>(shape.begin(), shape.end())};
  if (shape.empty()) return {all};
  std::vector<Box> out;
  cut(shape, 0, 0, begin, end, all, out);
  return out;
}

// One rank file as rank 0 finds it: whole, with everything it describes.
Description inspect(const strata_ckpt_save& save, int32_t rank, uint64_t* bytes) {
  const std::string path = save.partial + "/" + rank_file_name(rank);
  if (!exists(path)) raise_missing(save, rank, path);
  h5::Session session;
  const h5::File file = h5::File::open(path);
  *bytes = file_size(path);
  Description d = from_json(file.read_text("/strata/json"), kRankFormat, path);
  check_same_save(save, rank, path, d);
  for (const Segment& s : d.segments) {
    if (s.owned[0].count == 0) continue;
    for (const Array& a : s.arrays) file.find("/segments/" + a.path, s.owned[0].count, a.element_bytes());
  }
  return d;
}

// The whole checkpoint's description: rank 0's own, with everybody's ownership and file sizes.
Description gather(const strata_ckpt_save& save) {
  Description d = save.description;
  d.format = kIndexFormat;
  for (Segment& s : d.segments) s.owned.clear();
  for (int32_t rank = 0; rank < d.world; ++rank) {
    RankFile file{rank_file_name(rank), 0};
    add_ownership(d, inspect(save, rank, &file.bytes));
    d.files.push_back(file);
  }
  d.check_owned(STRATA_FAILED_PRECONDITION, "'" + d.tag + "'");
  return d;
}

void remove_strangers(const strata_ckpt_save& save, const Description& d) {
  std::set<std::string> expected;
  for (const RankFile& f : d.files) expected.insert(f.file);
  if (save.has_weights) expected.insert(kWeightsFile);
  for (const std::string& name : list_directory(save.partial)) {
    const std::string path = save.partial + "/" + name;
    if (!expected.count(name) && std::remove(path.c_str()) != 0) raise_errno(errno, "remove", path);
  }
}

std::vector<h5::Mapping> mappings(const Description& d, const Param& p, const Array& array,
                                  const std::vector<size_t>& owners) {
  std::vector<h5::Mapping> out;
  const auto& owned = d.segments[p.segment].owned;
  const auto first =
      std::partition_point(owners.begin(), owners.end(), [&](size_t rank) { return owned[rank].end() <= p.offset; });
  for (auto it = first; it != owners.end() && owned[*it].offset < p.offset + p.elements; ++it) {
    const Range r = owned[*it];
    const uint64_t begin = std::max(r.offset, p.offset), end = std::min(r.end(), p.offset + p.elements);
    for (const Box& box : boxes(p.shape, begin - p.offset, end - p.offset)) {
      const uint64_t source = p.offset + box.flat - r.offset;
      out.push_back({d.files[*it].file, "/segments/" + array.path, r.count, source, box.start, box.count});
    }
  }
  return out;
}

void add_param(h5::File& file, const Description& d, const Param& p, const std::vector<std::vector<size_t>>& owners) {
  const Param& owner = d.params[p.owner];
  const std::vector<hsize_t> shape(p.shape.begin(), p.shape.end());
  for (const Array& a : d.segments[owner.segment].arrays) {
    const std::string group = "/" + escape_component(a.name) + "/";
    if (p.is_alias) {
      file.create_alias(group + p.path, group + owner.path);
    } else if (p.elements == 0) {
      file.create_dataset(group + p.path, a.dtype, shape);
    } else {
      file.create_virtual(group + p.path, a.dtype, shape, mappings(d, p, a, owners[p.segment]));
    }
  }
}

void write_index(const strata_ckpt_save& save, const Description& d) {
  const std::string temporary = save.partial + "/.index.h5";
  {
    h5::Session session;
    h5::File file = h5::File::create(temporary, 1, 1, 0);
    file.write_attribute("format", std::string(kIndexFormat));
    file.write_text("/strata/json", to_json(d));
    const auto owners = d.owners_in_order();
    for (const Param& p : d.params) {
      if (!p.is_alias) add_param(file, d, p, owners);
    }
    for (const Param& p : d.params) {
      if (p.is_alias) add_param(file, d, p, owners);
    }
    file.close();
  }
  sync_path(temporary);
  rename_over(temporary, save.partial + "/index.h5");
  sync_path(save.partial);
}

}  // namespace

void raise_missing(const strata_ckpt_save& save, int32_t rank, const std::string& path) {
  raise(STRATA_FAILED_PRECONDITION, "'", save.description.tag, "': rank ", rank, "'s file ", path,
        " is missing; do all ranks write to the same directory?");
}

void check_same_save(const strata_ckpt_save& save, int32_t rank, const std::string& path, const Description& found) {
  const Description& mine = save.description;
  if (found.fingerprint != mine.fingerprint || found.rank != rank || found.segments.size() != mine.segments.size()) {
    raise(STRATA_FAILED_PRECONDITION, "'", mine.tag, "': ", path, " belongs to another save (fingerprint ",
          found.fingerprint, ", rank ", found.rank, "; expected ", mine.fingerprint, ", rank ", rank,
          "); did the ranks give different params, meta or tags?");
  }
  for (const Segment& s : found.segments) {
    if (s.owned.size() != 1) raise(STRATA_DATA_LOSS, path, ": segment '", s.name, "' has ", s.owned.size(), " owners");
  }
}

void add_ownership(Description& whole, const Description& of_rank) {
  for (size_t k = 0; k < whole.segments.size(); ++k) {
    whole.segments[k].owned.push_back(of_rank.segments[k].owned[0]);
  }
}

// A new tag is announced before it exists: a reader that comes after a kill between the two renames finds the newer
// checkpoint. One that is there would count at once: it is announced when it has been replaced.
void commit_checkpoint(strata_ckpt& self, strata_ckpt_save& save) {
  const std::string& tag = save.description.tag;
  bool is_new = true, in_one_step = true, has_name = false;
  try {
    take_partial(save);
    const Description d = gather(save);
    if (save.has_weights) finish_weights(save);
    remove_strangers(save, d);
    write_index(save, d);
    require_replaceable(save.committed);
    is_new = !exists(save.committed);
    write_announcement(save.root, tag);
    if (is_new) announce(save.root, tag);
    in_one_step = take_name(save);
    has_name = true;
    sync_path(save.root);
    if (!is_new) announce(save.root, tag);
    name_latest(save.root);
  } catch (...) {
    has_name ? remove_replaced(save) : remove_tree(save.partial);
    remove_quietly(announcement_path(save.root, tag));
    throw;
  }
  if (is_new) return;
  remove_replaced(save);
  const auto say = [&](const std::string& text) {
    self.host->log(self.host->ctx, STRATA_LOG_INFO, "checkpoint", text.c_str());
  };
  say(save.committed + ": replaced");
  if (in_one_step || self.said_two_renames.exchange(true)) return;
  say(save.root + ": this file system cannot exchange two names; '" + tag + "' was replaced by two renames");
}

}  // namespace strata::checkpoint

// export.cc - one file with every weight, written by all ranks at once into their own byte ranges.
//
// Phase 0: rank 0 clears what a dead run left, lets HDF5 lay out one contiguous dataset per param behind a user block,
// and puts the safetensors header into that block; bytes that are no param's are listed as fillers. Its description
// goes beside the file (layout.json), so that a rank with other arguments is noticed. Phase 1: every rank finds the
// datasets' offsets in the file, writes what it owns, and leaves its own description, from which commit sees that all
// parts are there. What a dead run left is written over, or of another save, which the descriptions tell.
//
// The finished file depends on the params alone: not on the world, the run or the time.
#include <algorithm>

#include "describe.h"
#include "save.h"
#include "writer.h"

namespace strata::checkpoint {
namespace {

// Enough for every dtype. A larger one costs HDF5 a search over the gaps it leaves, quadratic in the number of params.
constexpr uint64_t kParamAlign = 8;
constexpr uint64_t kMostHeader = 100'000'000;  // what safetensors readers accept

std::string weights_path(const strata_ckpt_save& save) { return save.partial + "/" + kWeightsFile; }

std::string layout_path(const strata_ckpt_save& save) { return save.partial + "/layout.json"; }

std::string mark_name(int32_t rank) { return "rank" + std::to_string(rank) + ".json"; }

std::string mark_path(const strata_ckpt_save& save, int32_t rank) { return save.partial + "/" + mark_name(rank); }

void check_weights(const Description& d) {
  for (const Param& p : d.params) {
    if (p.is_alias || d.segments[p.segment].find_array(kWeight)) continue;
    raise(STRATA_INVALID_ARGUMENT, "'", d.tag, "': segment '", d.segments[p.segment].name, "' of param '", p.name,
          "' has no array 'weight'");
  }
}

// A header that is at least as long as the real one will be: every number at its longest.
uint64_t header_bound(const Description& d) {
  std::vector<TensorSpan> spans;
  const uint64_t widest = uint64_t{1} << 62;
  for (const Param& p : d.params) {
    spans.push_back({nullptr, widest, widest});
    if (!p.is_alias) spans.push_back({&p, widest, widest});
  }
  spans.push_back({nullptr, widest, widest});
  return safetensors_header(spans, d.params).size();
}

std::vector<h5::Place> create_datasets(h5::File& file, const Description& d) {
  std::vector<h5::Place> places(d.params.size());
  file.write_attribute("format", std::string("strata.weights/1"));
  for (size_t k = 0; k < d.params.size(); ++k) {
    const Param& p = d.params[k];
    if (p.is_alias) continue;
    places[k] = file.create_dataset("/" + p.path, p.dtype, {p.shape.begin(), p.shape.end()});
  }
  for (const Param& p : d.params) {
    if (p.is_alias) file.create_alias("/" + p.path, "/" + d.params[p.owner].path);
  }
  return places;
}

// Params and, between them, fillers: every byte after the user block, in order.
std::vector<TensorSpan> spans_of(const Description& d, const std::vector<h5::Place>& places, uint64_t user_block,
                                 uint64_t file_bytes) {
  std::vector<TensorSpan> params, all;
  for (size_t k = 0; k < places.size(); ++k) {
    if (d.params[k].is_alias) continue;
    params.push_back({&d.params[k], places[k].bytes ? places[k].offset - user_block : 0, places[k].bytes});
  }
  std::sort(params.begin(), params.end(), [](const TensorSpan& a, const TensorSpan& b) {
    return std::make_pair(a.offset, a.bytes) < std::make_pair(b.offset, b.bytes);
  });
  uint64_t end = 0;
  for (const TensorSpan& span : params) {
    if (span.offset > end) all.push_back({nullptr, end, span.offset - end});
    all.push_back(span);
    end = span.offset + span.bytes;
  }
  const uint64_t total = file_bytes - user_block;
  if (total > end) all.push_back({nullptr, end, total - end});
  return all;
}

void write_header(io::DirectFile& file, const std::string& path, std::string json, uint64_t user_block) {
  const uint64_t bytes = user_block - 8;
  if (json.size() > bytes) raise(STRATA_INTERNAL, path, ": the safetensors header of ", json.size(), " does not fit");
  json.resize(bytes, ' ');
  unsigned char length[8];
  for (int k = 0; k < 8; ++k) length[k] = static_cast<unsigned char>(bytes >> (8 * k));
  int e = file.write_at(0, length, sizeof(length));
  if (!e) e = file.write_at(sizeof(length), json.data(), json.size());
  if (e) raise_errno(e, "write", path);
}

// Where each param lies, read back from the file that rank 0 made; in the order of params, aliases empty.
std::vector<h5::Place> find_datasets(const strata_ckpt_save& save) {
  const Description& d = save.description;
  const std::string layout = layout_path(save);
  if (!exists(layout)) {
    raise(STRATA_FAILED_PRECONDITION, "'", d.tag, "' on rank ", d.rank, ": rank 0's ", layout,
          " is missing; do all ranks export to the same directory?");
  }
  if (from_json(read_text_file(layout), kRankFormat, layout).fingerprint != d.fingerprint) {
    raise(STRATA_FAILED_PRECONDITION, "'", d.tag, "' on rank ", d.rank, ": ", layout,
          " was made for other arguments; did the ranks give different params, meta or names?");
  }
  h5::Session session;
  const h5::File file = h5::File::open(weights_path(save));
  std::vector<h5::Place> places(d.params.size());
  for (size_t k = 0; k < d.params.size(); ++k) {
    const Param& p = d.params[k];
    if (!p.is_alias) places[k] = file.find("/" + p.path, p.elements, find_dtype(p.dtype)->bytes);
  }
  return places;
}

// Writes the part of a param that this rank owns. What is small is written here and now: handing it to a thread would
// cost more than the write.
void write_param(BlockWriter& writer, const strata_ckpt_save_args& args, const Description& d, const Param& p,
                 const h5::Place& place) {
  const Segment& segment = d.segments[p.segment];
  const Range owned = segment.owned[0];
  const uint64_t begin = std::max(owned.offset, p.offset), end = std::min(owned.end(), p.offset + p.elements);
  const uint64_t size = find_dtype(p.dtype)->bytes;
  const uint64_t array = static_cast<uint64_t>(segment.find_array(kWeight) - segment.arrays.data());
  for (uint64_t at = begin; at < end;) {
    const uint64_t offset = place.offset + (at - p.offset) * size;
    const uint64_t count = std::min(end - at, kBufferBytes / size);
    char* data = writer.acquire(offset);
    read_elements(args, p.segment, array, {at, count}, data);
    const BlockWriter::Job job{data, offset, count * size, nullptr};
    if (job.bytes < io::kDirectMinimum) {
      writer.write_now(job);
    } else {
      writer.submit(job);
    }
    at += count;
  }
}

// Every rank has written its part, and the parts make up every param.
void check_marks(const strata_ckpt_save& save) {
  Description d = save.description;
  for (Segment& s : d.segments) s.owned.clear();
  for (int32_t rank = 0; rank < d.world; ++rank) {
    const std::string path = mark_path(save, rank);
    if (!exists(path)) raise_missing(save, rank, path);
    const Description found = from_json(read_text_file(path), kRankFormat, path);
    check_same_save(save, rank, path, found);
    add_ownership(d, found);
  }
  d.check_owned(STRATA_FAILED_PRECONDITION, "'" + d.tag + "'");
}

// Of a weight file alone: its directory, empty.
void make_room(const strata_ckpt_save& save) {
  if (exists(save.committed)) raise(STRATA_ALREADY_EXISTS, save.committed, ": a file of this name exists");
  if (!exists(save.root)) raise(STRATA_NOT_FOUND, save.committed, ": there is no directory ", save.root);
  remove_tree(save.partial);
  make_directory(save.partial);
}

}  // namespace

void export_layout(strata_ckpt& self, strata_ckpt_save& save) {
  const Description& d = save.description;
  check_weights(d);
  uint64_t user_block = 4096;
  const uint64_t bound = header_bound(d);
  while (user_block < bound + 8) user_block *= 2;
  if (user_block - 8 > kMostHeader) {
    raise(STRATA_INVALID_ARGUMENT, "'", d.tag, "': the safetensors header takes ", bound, " bytes, at most ",
          kMostHeader);
  }
  if (!save.has_rank_files) make_room(save);
  const std::string path = weights_path(save);
  save.weights_lock.take(path, true);
  uint64_t data = user_block;
  for (const Param& p : d.params) data += p.is_alias ? 0 : p.elements * find_dtype(p.dtype)->bytes;
  require_space(save.partial, data);
  std::vector<h5::Place> places;
  {
    h5::Session session;
    h5::File file = h5::File::create(path, 1, kParamAlign, user_block);
    places = create_datasets(file, d);
    file.close();
  }
  io::DirectFile file;
  open_for_data(self, path, file);
  const std::string header = safetensors_header(spans_of(d, places, user_block, file_size(path)), d.params);
  write_header(file, path, header, user_block);
  write_text_file(save.partial, "layout.json", to_json(d));
}

void export_data(strata_ckpt& self, const strata_ckpt_save_args& args, strata_ckpt_save& save) {
  const Description& d = save.description;
  check_weights(d);
  const std::string path = weights_path(save);
  const std::vector<h5::Place> places = find_datasets(save);
  io::DirectFile file;
  if (const int e = file.open(path, true, self.direct_io)) raise_errno(e, "open", path);
  {
    BlockWriter writer(file, path, self.io_threads);
    for (size_t k = 0; k < d.params.size(); ++k) {
      if (!d.params[k].is_alias) write_param(writer, args, d, d.params[k], places[k]);
    }
    writer.finish();
  }
  warn_if_not_direct(self, path, file);
  if (const int e = file.sync()) raise_errno(e, "sync", path);
  write_text_file(save.partial, mark_name(d.rank), to_json(d));
}

void finish_weights(const strata_ckpt_save& save) {
  check_marks(save);
  sync_path(weights_path(save));
}

void remove_own_weights(const strata_ckpt_save& save) {
  remove_quietly(mark_path(save, save.description.rank));
  if (save.description.rank != 0) return;
  remove_quietly(layout_path(save));
  remove_quietly(weights_path(save));
}

void commit_export(strata_ckpt_save& save) {
  try {
    finish_weights(save);
    rename_new(weights_path(save), save.committed);
  } catch (...) {
    remove_tree(save.partial);
    throw;
  }
  remove_tree(save.partial);
  sync_path(save.root);
}

}  // namespace strata::checkpoint

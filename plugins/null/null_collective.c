/* null_collective.c - strata.collective/1 of a world of one rank: every collective is a copy onto itself.
 *
 * A reduction of one rank still rounds to the output dtype. Any memory will do; alloc is there because callers ask
 * for their memory here. After abort, every call answers with the reason, as the header asks.
 *
 * Threads: abort comes from any thread, so a mutex guards its reason; all else from one caller at a time. */
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "null.h"
#include "null_numbers.h"
#include "strata/iface/collective.h"

typedef struct block {
  struct block* next;
  void* data;
} block;

struct strata_comm {
  const strata_host* host;
  char job[128];
  block* blocks;
  struct strata_comm* whole; /* of a part: what it was split from */
  pthread_mutex_t mutex;
  strata_status aborted;
  char reason[256];
};

static strata_status STRATA_CALL comm_open(const strata_open_args* args, strata_comm** out) {
  if (args->rank >= 0 && args->world > 1) {
    return null_fail(args->host, STRATA_FAILED_PRECONDITION,
                     "null collective: rank %d of %d; it serves a world of one rank", (int)args->rank,
                     (int)args->world);
  }
  strata_comm* self = calloc(1, sizeof *self);
  if (!self) return null_fail(args->host, STRATA_RESOURCE_EXHAUSTED, "null collective: out of memory");
  self->host = args->host;
  snprintf(self->job, sizeof self->job, "%s", args->job ? args->job : "null");
  pthread_mutex_init(&self->mutex, NULL);
  *out = self;
  return STRATA_OK;
}

static void STRATA_CALL comm_close(strata_comm* self) {
  for (block* b = self->blocks; b;) {
    block* next = b->next;
    free(b->data);
    free(b);
    b = next;
  }
  pthread_mutex_destroy(&self->mutex);
  free(self);
}

static strata_status STRATA_CALL comm_caps(strata_comm* self, strata_collective_caps* out) {
  out->rank = out->local_rank = 0;
  out->world = out->local_world = 1;
  out->flags = STRATA_COLL_FIXED_ORDER | STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT;
  out->memory = STRATA_CPU;
  out->job = self->job;
  return STRATA_OK;
}

static strata_status STRATA_CALL comm_alloc(strata_comm* self, uint64_t bytes, void** out) {
  *out = NULL;
  if (bytes == 0) return STRATA_OK;
  block* b = malloc(sizeof *b);
  void* data = null_aligned(bytes, 4096);
  if (!b || !data) {
    free(b);
    free(data);
    return null_fail(self->host, STRATA_RESOURCE_EXHAUSTED, "null collective alloc: the system refused %llu bytes",
                     (unsigned long long)bytes);
  }
  memset(data, 0, bytes);
  *b = (block){self->blocks, data};
  self->blocks = b;
  *out = data;
  return STRATA_OK;
}

static void STRATA_CALL comm_free(strata_comm* self, void* ptr) {
  block** link = &self->blocks;
  while (*link && (*link)->data != ptr) link = &(*link)->next;
  block* found = *link;
  if (!found) return;
  *link = found->next;
  free(found->data);
  free(found);
}

/* The reason given to abort, as this call's failure; STRATA_OK when there was none. */
static strata_status check_aborted(strata_comm* self) {
  if (self->whole) return check_aborted(self->whole);
  char reason[sizeof self->reason];
  pthread_mutex_lock(&self->mutex);
  const strata_status code = self->aborted;
  memcpy(reason, self->reason, sizeof reason);
  pthread_mutex_unlock(&self->mutex);
  return code == STRATA_OK ? STRATA_OK : null_fail(self->host, code, "null collective: aborted: %s", reason);
}

static void STRATA_CALL comm_abort(strata_comm* self, strata_status code, const char* text) {
  if (self->whole) {
    comm_abort(self->whole, code, text);
    return;
  }
  pthread_mutex_lock(&self->mutex);
  if (self->aborted == STRATA_OK) {
    self->aborted = code == STRATA_OK ? STRATA_CANCELLED : code;
    snprintf(self->reason, sizeof self->reason, "%s", text ? text : "no reason given");
  }
  pthread_mutex_unlock(&self->mutex);
}

static strata_status STRATA_CALL comm_barrier(strata_comm* self, const strata_coll_args* args) {
  (void)args;
  return check_aborted(self);
}

/* One rank's share of any sum: its own numbers, rounded once, every NaN as the one a sum stores. What is not a sum
 * keeps its bits; in == out is allowed. */
static strata_status move_item(strata_comm* self, const strata_coll_args* args, const strata_coll_item* item,
                               int is_sum) {
  const int is_number = is_sum && is_float(item->in_dtype) && is_float(item->out_dtype);
  if (item->in_dtype != item->out_dtype && !is_number) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null collective \"%s\": dtype %d into dtype %d",
                     args->label ? args->label : "", (int)item->in_dtype, (int)item->out_dtype);
  }
  static const uint8_t bytes[] = {0, 4, 2, 2, 1, 2, 8, 8}; /* by strata_dtype */
  if (item->in_dtype < STRATA_F32 || item->in_dtype > STRATA_F64) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null collective: unknown dtype %d", (int)item->in_dtype);
  }
  if (!is_number) {
    if (item->in != item->out && item->count > 0) memcpy(item->out, item->in, item->count * bytes[item->in_dtype]);
    return STRATA_OK;
  }
  fenv_t environment;
  fegetenv(&environment);
  fesetenv(FE_DFL_ENV);
  for (uint64_t i = 0; i < item->count; ++i) {
    store(item->out, item->out_dtype, i, load(item->in, item->in_dtype, i), STRATA_ROUND_EVEN);
  }
  fesetenv(&environment);
  return STRATA_OK;
}

static strata_status move_all(strata_comm* self, const strata_coll_args* args, strata_event* done, int is_sum) {
  strata_status code = check_aborted(self);
  for (uint64_t k = 0; code == STRATA_OK && k < args->item_count; ++k) {
    const char* item = (const char*)args->items + k * args->item_stride;
    code = move_item(self, args, (const strata_coll_item*)item, is_sum);
  }
  return code == STRATA_OK ? null_done(self->host, done) : code;
}

static strata_status STRATA_CALL comm_move(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return move_all(self, args, done, 0);
}
static strata_status STRATA_CALL comm_sum(strata_comm* self, const strata_coll_args* args, strata_event* done) {
  return move_all(self, args, done, 1);
}

static strata_status STRATA_CALL comm_exchange(strata_comm* self, const void* in, void* out, uint64_t bytes,
                                               const strata_coll_args* args) {
  (void)args;
  const strata_status code = check_aborted(self);
  if (code == STRATA_OK) memmove(out, in, bytes);
  return code;
}

/* The one part is a world of one rank again, which fails when this one does. */
static strata_status STRATA_CALL comm_split(strata_comm* self, int32_t colour, int32_t key,
                                            const strata_coll_args* args, strata_comm** out) {
  (void)colour, (void)key, (void)args;
  *out = NULL;
  const strata_status code = check_aborted(self);
  if (code != STRATA_OK) return code;
  const strata_open_args open_args = {.struct_size = sizeof open_args, .host = self->host, .job = self->job};
  const strata_status opened = comm_open(&open_args, out);
  if (opened == STRATA_OK) (*out)->whole = self;
  return opened;
}

const strata_collective_api null_collective = {
    .struct_size = sizeof(strata_collective_api),
    .abi_minor = STRATA_ABI_MINOR,
    .open = comm_open,
    .close = comm_close,
    .caps = comm_caps,
    .alloc = comm_alloc,
    .free = comm_free,
    .all_gather = comm_move,
    .reduce_scatter = comm_sum,
    .all_reduce = comm_sum,
    .broadcast = comm_move,
    .all_to_all = comm_move,
    .barrier = comm_barrier,
    .abort = comm_abort,
    .exchange = comm_exchange,
    .split = comm_split,
};

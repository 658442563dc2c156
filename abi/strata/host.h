/* SPDX-License-Identifier: MIT
 *
 * strata/host.h - what the core lends a plugin.
 *
 * A plugin never links the core: it gets one `strata_host` when an instance is opened, valid until that
 * instance is closed, and asks it for interfaces by string id. Several engines (several ranks as threads)
 * live in one process, so a plugin keeps the host pointer per instance and has no mutable globals.
 */
#ifndef STRATA_HOST_H
#define STRATA_HOST_H

#include "strata/types.h"

STRATA_EXTERN_C_BEGIN

typedef int32_t strata_log_level;
enum {
  STRATA_LOG_DEBUG = 1,
  STRATA_LOG_INFO = 2,
  STRATA_LOG_WARN = 3,
  STRATA_LOG_ERROR = 4,
  STRATA_LOG_HOST_MISBEHAVING = 5,
  STRATA_LOG_PLUGIN_MISBEHAVING = 6
};

typedef struct strata_host {
  uint32_t struct_size;
  uint32_t abi_minor;
  void *ctx; /* first argument of every function below */

  /* Writes one line. `text` is UTF-8 without a line break. [any] text [call] */
  void(STRATA_CALL *log)(void *ctx, strata_log_level level, const char *domain, const char *text);

  /* 1 when a line of this level would be written; ask before building an expensive text. [any] */
  int32_t(STRATA_CALL *would_log)(void *ctx, strata_log_level level);

  /* Keeps `text` as the reason of the failure this thread is about to return, and returns `code`, so that a
   * plugin writes `return host->fail(host->ctx, STRATA_NOT_FOUND, "...");`. [any] text [call], copied. */
  strata_status(STRATA_CALL *fail)(void *ctx, strata_status code, const char *text);

  /* A host interface by id ("strata.host.sync/1"), or NULL when this host has none of that name. [any] [static] */
  const void *(STRATA_CALL *get_interface)(void *ctx, const char *id);
} strata_host;

/* strata.host.sync/1 - events. An event is set exactly once, with a status and a text. */
#define STRATA_HOST_SYNC "strata.host.sync/1"
typedef struct strata_sync_api {
  uint32_t struct_size;
  uint32_t abi_minor;
  /* A fresh, unset event with one reference; NULL when memory is out. [any] */
  strata_event *(STRATA_CALL *create)(void *ctx);
  void(STRATA_CALL *retain)(strata_event *event);  /* [any] */
  void(STRATA_CALL *release)(strata_event *event); /* [any] the last one frees */
  /* Sets the event; `text` may be NULL for STRATA_OK and is copied. A second set is ignored. [any] */
  void(STRATA_CALL *set)(strata_event *event, strata_status code, const char *text);
  /* 1 when set. [any] does not block */
  int32_t(STRATA_CALL *is_set)(strata_event *event);
  /* Waits at most timeout_ns (-1: for ever) and returns the event's status, its text through `fail`;
   * STRATA_DEADLINE_EXCEEDED when it was not set in time. [any] blocks */
  strata_status(STRATA_CALL *wait)(strata_event *event, int64_t timeout_ns);
  /* Sets the event with the status and the text of `source`, for a plugin that wraps another: it waits for an event
   * of its own and passes the outcome on. A source that is not set gives DEADLINE_EXCEEDED. [any] does not block */
  void(STRATA_CALL *set_from)(strata_event *event, strata_event *source);
} strata_sync_api;

/* strata.host.executor/1 - the rank's worker threads. */
#define STRATA_HOST_EXECUTOR "strata.host.executor/1"
typedef struct strata_executor_api {
  uint32_t struct_size;
  uint32_t abi_minor;
  /* Runs fn(arg, i) for every i in [0, n) on the rank's workers and on the calling thread, and returns when all
   * are done. With one worker it is a plain loop. `fn` must not call parallel_for. [any] blocks */
  void(STRATA_CALL *parallel_for)(void *ctx, uint64_t n, void(STRATA_CALL *fn)(void *arg, uint64_t i), void *arg);
  /* Number of threads parallel_for uses, the caller included. [any] */
  uint32_t(STRATA_CALL *threads)(void *ctx);
} strata_executor_api;

/* strata.host.plugins/1 - other plugins, for one that wraps (fault) or builds on another. */
#define STRATA_HOST_PLUGINS "strata.host.plugins/1"
typedef struct strata_plugins_api {
  uint32_t struct_size;
  uint32_t abi_minor;
  /* Loads plugin `name` by the rules of the manifest and returns its table for `interface_id`, completed with
   * defaults for optional slots. [control] [static] NOT_FOUND, FAILED_PRECONDITION */
  strata_status(STRATA_CALL *find)(void *ctx, const char *name, const char *interface_id, const void **table);
  /* The options of [plugin.<name>] in the manifest, checked, defaults filled in; an empty list when there are
   * none. [control] borrowed until close */
  strata_status(STRATA_CALL *options)(void *ctx, const char *name, const strata_options **out);
} strata_plugins_api;

/* What every plugin instance is opened with. Everything in it is [self]-lasting except where noted: the strings
 * and options are [call], the host and the device outlive the instance. */
typedef struct strata_open_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  const strata_host *host;
  const strata_options *options; /* [call] from [plugin.<name>], defaults filled in from the plugin's TOML */
  const char *job;               /* [call] name the ranks of one job share; NULL: from the environment */
  int32_t rank;                  /* -1: not known yet (the collective finds it in the environment) */
  int32_t world;
  int32_t local_rank;
  int32_t local_world;
  uint32_t threads;     /* 1: ranks are threads of this process, 0: ranks are processes */
  uint32_t reserved;
  int64_t deadline_ns;  /* no wait inside the plugin is longer than this */
  const void *device;   /* the rank's strata_device_api table, NULL while the device itself is opened */
  void *device_self;    /* and its instance: what `self` is in that table */
} strata_open_args;

STRATA_EXTERN_C_END
#endif

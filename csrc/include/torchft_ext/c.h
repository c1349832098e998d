/* The interface of torchft_ext/comm.h for C99, and for languages that can call C: Rust, Go, Julia.
 *
 * Handles are opaque. Every function that can fail returns a tft_status; nothing is thrown. A
 * caller may pass a tft_error, which then describes the failure, or NULL. torchft_ext/comm.h
 * describes ownership, threads, generations, and the state after a failure. Numbers of the enums
 * are fixed: append only.
 */
#ifndef TORCHFT_EXT_C_H
#define TORCHFT_EXT_C_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* TFT_OK, or the kind of the failure as in torchft_ext/failure.h, or one of the last three. */
typedef enum tft_status {
  TFT_OK = 0,
  TFT_PEER_LOST = 1,
  TFT_PEER_LEFT = 2,
  TFT_CONNECTION_LOST = 3,
  TFT_TIMEOUT = 4,
  TFT_ABORTED = 5,
  TFT_STORE_LOST = 6,
  TFT_MISMATCH = 7,
  TFT_RENDEZVOUS = 8,
  TFT_INTERNAL = 9,
  TFT_INVALID_ARGUMENT = 100, /* nothing was sent */
  TFT_INVALID_STATE = 101,    /* shut down, configuring already, in a forked child */
  TFT_SYSTEM = 102            /* memory, threads, descriptors, files */
} tft_status;

typedef struct tft_error {
  tft_status status;
  int rank;           /* who caused it, in the failed generation; -1: not known */
  int other_rank;     /* of a lost connection, the rank at its other end; else -1 */
  int64_t pid;        /* of that process; -1: not known */
  int64_t generation; /* that failed; -1: none */
  char host[256];     /* of that process; "": not known */
  char message[1024]; /* one line: operation, group, rank, generation, who, how, and what to do */
  char operation[64]; /* "allreduce", "configure", ...; "": between operations */
  char how[512];      /* one clause: "its process ended", ...; "": no failure of a generation */
  int64_t elapsed_ns; /* of the operation */
  int64_t limit_ns;   /* of the operation; 0: it had none */
} tft_error;

typedef enum tft_type {
  TFT_FLOAT32 = 0,
  TFT_FLOAT64 = 1,
  TFT_FLOAT16 = 2,
  TFT_BFLOAT16 = 3,
  TFT_INT8 = 4,
  TFT_INT16 = 5,
  TFT_INT32 = 6,
  TFT_INT64 = 7,
  TFT_UINT8 = 8,
  TFT_BOOL = 9
} tft_type;

typedef enum tft_reduction {
  TFT_SUM = 0,
  TFT_AVG = 1,
  TFT_PRODUCT = 2,
  TFT_MIN = 3,
  TFT_MAX = 4,
  TFT_BIT_AND = 6,
  TFT_BIT_OR = 7,
  TFT_BIT_XOR = 8
} tft_reduction;

size_t tft_size_of(tft_type type); /* in bytes; 0: no such type */

typedef struct tft_comm tft_comm;
typedef struct tft_store tft_store;
typedef struct tft_request tft_request;

/* A store that the program implements. The library calls the functions on a thread of its own, one
 * call at a time for each store, and passes `context` to each. They may block. They return 0 for
 * success; any other value means that the store cannot be reached. */
typedef struct tft_store_calls {
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t bytes);
  /* Calls `found` with the value if there is one, before it returns; must not wait for a value. */
  int (*get)(void* context, const char* key,
             void (*found)(void* to, const void* value, size_t bytes), void* to);
  int (*remove)(void* context, const char* key);
  void (*release)(void* context); /* called once, last; may be NULL */
} tft_store_calls;

tft_status tft_store_create(const tft_store_calls* calls, tft_store** store, tft_error* error);
/* Files in a directory that all processes see; made if it does not exist. */
tft_status tft_store_create_file(const char* directory, tft_store** store, tft_error* error);
/* For groups of one, and tests. */
tft_status tft_store_create_memory(tft_store** store, tft_error* error);
/* Groups that use the store keep what they need of it. Does nothing for NULL. */
void tft_store_destroy(tft_store* store);

/* A field that is zero or NULL has the default of torchft_ext/comm.h. Begin with all fields zero.
 */
typedef struct tft_options {
  const char* name;
  int64_t timeout_ms;
  const char* interface_name; /* "eth0", "10.0.0.5", ...; NULL: loopback */
  const char* port_range;
  int no_local_sockets;
  int64_t heartbeat_ms; /* -1: off */
  int64_t ask_after_ms; /* -1: off */
} tft_options;

/* One phase of a configure(), and how long it took. */
typedef struct tft_phase {
  char name[32];
  int64_t took_ns;
} tft_phase;

/* Counts since the group was made. */
typedef struct tft_stats {
  uint64_t generations;
  uint64_t failed_configures;
  uint64_t operations;
  uint64_t bytes_sent;
  uint64_t bytes_received;
  tft_error last_failure; /* its status TFT_OK: none */
  int phases;             /* how many last_configure has */
  tft_phase last_configure[8];
} tft_stats;

/* options: NULL for the defaults. */
tft_status tft_comm_create(const tft_options* options, tft_comm** comm, tft_error* error);
/* The generation fails on the others, unless the group was shut down. Does nothing for NULL. */
void tft_comm_destroy(tft_comm* comm);
/* timeout_ms here and below: 0 for that of the options. */
tft_status tft_comm_configure(tft_comm* comm, tft_store* store, const char* prefix, int rank,
                              int size, int64_t timeout_ms, tft_error* error);
tft_status tft_comm_abort(tft_comm* comm, const char* why, tft_error* error);
tft_status tft_comm_shutdown(tft_comm* comm, int64_t timeout_ms, tft_error* error);
/* TFT_OK, or why the generation or the last configure failed. Never blocks. */
tft_status tft_comm_errored(tft_comm* comm, tft_error* error);
tft_status tft_comm_check(tft_comm* comm, int64_t timeout_ms, tft_error* error);
int tft_comm_rank(const tft_comm* comm);
int tft_comm_size(const tft_comm* comm);
int64_t tft_comm_generation(const tft_comm* comm);
/* Of later operations and configures. */
tft_status tft_comm_set_timeout(tft_comm* comm, int64_t timeout_ms, tft_error* error);
tft_status tft_comm_stats(const tft_comm* comm, tft_stats* stats, tft_error* error);
/* The callback is called once for each generation that fails, on a thread of the library. NULL ends
 * the calls. */
tft_status tft_comm_on_failure(tft_comm* comm,
                               void (*callback)(void* context, const tft_error* failure),
                               void* context, tft_error* error);

/* Operations: torchft_ext/comm.h says which memory each one needs. They return immediately, and the
 * caller waits for `request` and destroys it. If `request` is NULL, the call itself waits, and
 * returns the operation's result. */
tft_status tft_allreduce(tft_comm* comm, void* data, size_t count, tft_type type,
                         tft_reduction reduction, int64_t timeout_ms, tft_request** request,
                         tft_error* error);
tft_status tft_broadcast(tft_comm* comm, void* data, size_t count, tft_type type, int root,
                         int64_t timeout_ms, tft_request** request, tft_error* error);
tft_status tft_allgather(tft_comm* comm, const void* input, void* all, size_t count, tft_type type,
                         int64_t timeout_ms, tft_request** request, tft_error* error);
tft_status tft_reduce_scatter(tft_comm* comm, const void* all, void* output, size_t count,
                              tft_type type, tft_reduction reduction, int64_t timeout_ms,
                              tft_request** request, tft_error* error);
tft_status tft_reduce(tft_comm* comm, const void* input, void* output, size_t count, tft_type type,
                      tft_reduction reduction, int root, int64_t timeout_ms, tft_request** request,
                      tft_error* error);
tft_status tft_gather(tft_comm* comm, const void* input, void* all, size_t count, tft_type type,
                      int root, int64_t timeout_ms, tft_request** request, tft_error* error);
tft_status tft_scatter(tft_comm* comm, const void* all, void* output, size_t count, tft_type type,
                       int root, int64_t timeout_ms, tft_request** request, tft_error* error);
tft_status tft_alltoall(tft_comm* comm, const void* all_inputs, void* all_outputs, size_t count,
                        tft_type type, int64_t timeout_ms, tft_request** request, tft_error* error);
tft_status tft_barrier(tft_comm* comm, int64_t timeout_ms, tft_request** request, tft_error* error);
tft_status tft_send(tft_comm* comm, const void* data, size_t count, tft_type type, int destination,
                    int tag, int64_t timeout_ms, tft_request** request, tft_error* error);
/* source: -1 for any rank. */
tft_status tft_recv(tft_comm* comm, void* data, size_t count, tft_type type, int source, int tag,
                    int64_t timeout_ms, tft_request** request, tft_error* error);

/* Blocks until the operation is done. Returns TFT_OK or its failure. May be called again, and from
 * several threads. */
tft_status tft_request_wait(tft_request* request, tft_error* error);
int tft_request_done(const tft_request* request);
/* TFT_OK if the operation is not done, or has succeeded. Never blocks. */
tft_status tft_request_failure(const tft_request* request, tft_error* error);
int tft_request_source(const tft_request* request);
/* The operation continues. Does nothing for NULL. */
void tft_request_destroy(tft_request* request);

/* "0.1.0" */
const char* tft_version(void);

/* The log: torchft_ext/log.h. */
typedef enum tft_log_level {
  TFT_LOG_INFO = 0,
  TFT_LOG_WARNING = 1,
  TFT_LOG_ERROR = 2,
  TFT_LOG_NOTHING = 3
} tft_log_level;

/* Lines below this level are dropped. */
void tft_set_log_level(tft_log_level least);
/* Lines go to this sink only. NULL restores the default. The sink must not call the library, except
 * tft_version(). A call of the old sink may still be running when a new one is set. So free the
 * context only after tft_end_process() has returned 1, or never. */
tft_status tft_set_log_sink(void (*sink)(void* context, tft_log_level level, const char* line),
                            void* context, tft_error* error);

/* Writes what all groups of this process have recorded to a file: dump() of torchft_ext/comm.h.
 * TFT_SYSTEM: the file cannot be written. */
tft_status tft_dump(const char* path, tft_error* error);

/* Says goodbye for every group and ends all threads of the library in this process, as exit() does.
 * Call it before you unload the library. 0: something did not end within the timeout. timeout_ms: 0
 * for a second. */
int tft_end_process(int64_t timeout_ms);

#ifdef __cplusplus
}
#endif

#endif /* TORCHFT_EXT_C_H */

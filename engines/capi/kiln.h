/* Kiln's C API: open an engine bundle, submit requests, read tokens, run plain models.
 *
 *   const kiln_api *kiln = kiln_get_api(KILN_API_VERSION);
 *   kiln_open_params params;
 *   kiln->default_open_params(&params, sizeof params);
 *   params.bundle = "bundles/smollm2";
 *   kiln_engine *engine;
 *   kiln_status *status = kiln->open(&params, &engine);
 *   if (status != NULL) { puts(kiln->status_message(status)); kiln->status_free(status); }
 *
 * Rules, for every function of the table:
 *
 *   Errors     A function that can fail returns a status: NULL is success. The caller reads its code and message and
 *              frees it with `status_free`. When a function fails, its out-parameters are NULL or 0.
 *   Handles    `kiln_engine` and `kiln_stream` are names, not addresses: one that is null, wrong, closed or of another
 *              kind is answered with KILN_INVALID_HANDLE. They are never reused within a process.
 *   Memory     What the library hands out through an out-parameter other than a handle (texts, tokens, chunks, outputs)
 *              is the caller's to free with `release`, and stays valid until then, also after the engine is closed.
 *              What the caller passes in is copied before the function returns.
 *   Text       UTF-8. Inputs end with a NUL; outputs end with one and may, as generated text, contain others.
 *   Threads    Every function may be called from any thread at any time. A function that waits holds no lock.
 *   Boundary   No exception, signal handler or exit leaves the library. SIGINT and all others stay the program's own.
 *   Versions   `kiln_get_api` hands out tables; new versions append functions, and new fields at the end of structs. A
 *              program that was compiled with an older header runs unchanged with a newer library.
 */
#ifndef KILN_H
#define KILN_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KILN_EXPORT __attribute__((visibility("default")))
#else
#define KILN_EXPORT
#endif

/* The newest version that this header describes. */
#define KILN_API_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

/* From here to END OF DECLARATIONS plain declarations only: cffi reads them too. */

typedef struct kiln_status kiln_status;
typedef struct kiln_engine kiln_engine;
typedef struct kiln_stream kiln_stream;

typedef enum kiln_code {
  KILN_OK = 0,
  KILN_INVALID_ARGUMENT = 1, /* the caller can mend it: the message says what was found and expected */
  KILN_INVALID_HANDLE = 2,   /* null, never handed out, closed, or of another kind */
  KILN_BAD_BUNDLE = 3,       /* the bundle is missing, damaged, or does not run on this machine */
  KILN_QUEUE_FULL = 4,       /* as many requests wait as may: try again later */
  KILN_TIMED_OUT = 5,        /* `infer` took longer than its timeout */
  KILN_REQUEST_FAILED = 6,   /* this request failed; the engine goes on */
  KILN_NO_PYTHON = 7,        /* Python, or Kiln in it, cannot be started */
  KILN_INTERRUPTED = 8,      /* the host is a Python program, and was interrupted */
  KILN_OUT_OF_MEMORY = 9,
  KILN_INTERNAL = 10         /* a bug in Kiln: please report the message */
} kiln_code;

typedef enum kiln_lane {
  KILN_INTERACTIVE = 0, /* goes first */
  KILN_BATCH = 1        /* takes what is left, and its share where both want more than there is */
} kiln_lane;

typedef enum kiln_event {
  KILN_NOTHING_YET = 0, /* the wait ended before anything came */
  KILN_CHUNK = 1,       /* there is a chunk */
  KILN_END = 2          /* every choice has its outcome and everything was read */
} kiln_event;

typedef enum kiln_finish {
  KILN_UNFINISHED = 0, /* more chunks of this choice follow */
  KILN_STOP = 1,       /* an end-of-sequence token or a stop string */
  KILN_LENGTH = 2,     /* max_tokens or the context is used up */
  KILN_CANCELLED = 3,  /* by the caller, or by closing the engine */
  KILN_TIMEOUT = 4     /* the request's own timeout passed */
} kiln_finish;

typedef enum kiln_guidance {
  KILN_UNGUIDED = 0,
  KILN_JSON_SCHEMA = 1, /* `guide` is a JSON Schema */
  KILN_JSON_OBJECT = 2, /* any JSON object */
  KILN_REGEX = 3,       /* `guide` is a regular expression */
  KILN_CHOICES = 4,     /* one of `choices` */
  KILN_GRAMMAR = 5      /* `guide` is a grammar in llguidance's Lark dialect */
} kiln_guidance;

/* How to open a bundle. Filled by `default_open_params`; `bundle` is to be set. */
typedef struct kiln_open_params {
  size_t size;                   /* of this struct, as the program knows it */
  const char *bundle;            /* folder of the bundle */
  const char *python_executable; /* the interpreter of the environment that Kiln is installed in, such as
                                    "/opt/kiln/bin/python"; NULL: the one that built this library. The first `open` of a
                                    process starts Python with it, whatever the environment variables say; a program
                                    that runs Python already leaves it NULL. */
  const char *python_path;       /* folders to search for packages before all others, separated by ':'; NULL: none */
  const char *options;           /* JSON object of the options of Engine.open and SchedulerConfig, such as
                                    {"kv_blocks": 512, "threads": 4, "max_running": 32}; NULL: the defaults */
} kiln_open_params;

typedef struct kiln_token_bias {
  int32_t token;
  float bias; /* -100 to 100, added to the token's logit */
} kiln_token_bias;

/* What to generate. Filled by `default_request` (greedy, up to what the context leaves); `prompt` or `tokens` is to be
 * set. The meanings are those of the OpenAI API, and of engines/runtime/request.py. */
typedef struct kiln_request {
  size_t size;        /* of this struct, as the program knows it */
  const char *prompt; /* text, or NULL where `tokens` is given */
  const int32_t *tokens;
  size_t token_count;
  const char *tenant; /* requests share cached prefixes of their own tenant only; "" by default */
  int32_t lane;       /* kiln_lane */
  int32_t n;          /* answers to the prompt, 1 to 128 */
  double timeout;     /* seconds after which the request ends with what it has; INFINITY: never */
  int32_t max_tokens; /* most tokens to generate; the context may leave fewer */
  int32_t ignore_eos; /* not 0: go on after an end-of-sequence token */
  const char *const *stop;
  size_t stop_count;
  double temperature; /* 0: greedy */
  double top_p;
  double min_p;
  int32_t top_k; /* INT32_MAX keeps all */
  int32_t logprobs;     /* not 0: report the log-probability of every token */
  int32_t top_logprobs; /* and of so many of the most likely ones, 0 to 20 */
  int32_t seeded;       /* not 0: use `seed`, else one from the operating system */
  uint64_t seed;
  double frequency_penalty;
  double presence_penalty;
  double repetition_penalty;
  const kiln_token_bias *logit_bias;
  size_t logit_bias_count;
  int32_t guidance; /* kiln_guidance */
  const char *guide;
  const char *const *choices;
  size_t choice_count;
} kiln_request;

typedef struct kiln_token_logprob {
  int32_t token;
  double logprob; /* nats, of the model's own distribution */
} kiln_token_logprob;

typedef struct kiln_logprobs {
  kiln_token_logprob chosen;
  const kiln_token_logprob *top; /* the most likely ones, the first first */
  size_t top_count;
} kiln_logprobs;

/* What one step added to one choice. `text` may be empty although there are tokens: a character is still incomplete, or
 * the text could begin a stop string; it is then part of a later chunk. */
typedef struct kiln_chunk {
  int32_t choice; /* 0 to n - 1 */
  int32_t finish; /* kiln_finish; not KILN_UNFINISHED in the last chunk of a choice */
  const int32_t *tokens;
  size_t token_count;
  const char *text;
  size_t text_length;            /* bytes, without the NUL */
  const kiln_logprobs *logprobs; /* one for each token, where the request asked for them */
  size_t logprobs_count;
} kiln_chunk;

/* A dense tensor in row-major order. `dtype` is NumPy's name, as in `describe`: "float32", "int64", "bfloat16"... */
typedef struct kiln_tensor {
  const char *name;
  const char *dtype;
  const int64_t *shape;
  size_t rank;
  const void *data;
  size_t bytes;
} kiln_tensor;

/* One run of a model without a KV cache. Filled by `default_inference`; `inputs` is to be set. */
typedef struct kiln_inference {
  size_t size; /* of this struct, as the program knows it */
  const kiln_tensor *inputs;
  size_t input_count;
  int32_t lane;   /* kiln_lane */
  double timeout; /* seconds; INFINITY: never */
} kiln_inference;

typedef struct kiln_outputs {
  const kiln_tensor *tensors;
  size_t count;
} kiln_outputs;

typedef struct kiln_api {
  uint32_t version; /* the version that was asked for */
  size_t size;      /* bytes of this table */

  /* Kiln's version, such as "1.2.0". A constant: not to be freed. */
  const char *(*library_version)(void);

  /* KILN_OK for NULL, KILN_INVALID_HANDLE for what is no status, or was freed. */
  kiln_code (*status_code)(const kiln_status *status);
  /* One line or a few, without a newline at the end. Valid until `status_free`; never NULL. */
  const char *(*status_message)(const kiln_status *status);
  /* NULL, and what is no status, is ignored. */
  void (*status_free)(kiln_status *status);

  /* Fill `params` with the defaults; `size` is sizeof *params. The same for the two below. */
  kiln_status *(*default_open_params)(kiln_open_params *params, size_t size);
  kiln_status *(*default_request)(kiln_request *request, size_t size);
  kiln_status *(*default_inference)(kiln_inference *inference, size_t size);

  /* Verify a bundle and open it; the first call of a process also starts Python. `*engine` is the caller's, to be given
   * back with `close`. */
  kiln_status *(*open)(const kiln_open_params *params, kiln_engine **engine);
  /* Cancel outstanding requests, each of which gets its outcome, and free the engine. Its streams stay readable. One
   * that is left open is closed when the program ends. */
  kiln_status *(*close)(kiln_engine *engine);
  /* What the engine is: a JSON object with name, kind ("decoder" or "model"), lengths, inputs and outputs. Free `*json`
   * with `release`. */
  kiln_status *(*describe)(kiln_engine *engine, const char **json);
  /* Counters, histograms and gauges in Prometheus' text format. Free `*text` with `release`. */
  kiln_status *(*metrics)(kiln_engine *engine, const char **text);

  /* Token ids of a plain prompt, special tokens included. Free `*tokens` with `release`. */
  kiln_status *(*tokenize)(kiln_engine *engine, const char *text, const int32_t **tokens, size_t *count);
  /* Token ids of a chat by the model's chat template, up to where the answer begins. `messages` is a JSON array of
   * objects with role and content. Free `*tokens` with `release`. */
  kiln_status *(*tokenize_chat)(kiln_engine *engine, const char *messages, const int32_t **tokens, size_t *count);
  /* Text of token ids, without special tokens. Free `*text` with `release`. */
  kiln_status *(*detokenize)(kiln_engine *engine, const int32_t *tokens, size_t count, const char **text);

  /* Queue a request and return at once. `*stream` is the caller's, to be given back with `stream_close`. */
  kiln_status *(*submit)(kiln_engine *engine, const kiln_request *request, kiln_stream **stream);
  /* Wait at most `timeout` seconds (0: only look; INFINITY: as long as it takes) for the next chunk of any choice. Each
   * chunk is given to one caller. `*chunk` is NULL unless `*event` is KILN_CHUNK; free it with `release`.
   * KILN_REQUEST_FAILED says, once, that a choice failed; the other choices go on until KILN_END. */
  kiln_status *(*wait)(kiln_stream *stream, double timeout, kiln_event *event, const kiln_chunk **chunk);
  /* End the request before the next step; what was generated stays readable. Without effect on one that is done. */
  kiln_status *(*cancel)(kiln_stream *stream);
  /* Cancel the request if it is not done, and give the stream back. */
  kiln_status *(*stream_close)(kiln_stream *stream);

  /* Run a model without a KV cache. Free `*outputs`, with all that it points to, with `release`. */
  kiln_status *(*infer)(kiln_engine *engine, const kiln_inference *inference, const kiln_outputs **outputs);

  /* Free what an out-parameter gave. NULL is ignored; KILN_INVALID_ARGUMENT for what is not there to be freed. */
  kiln_status *(*release)(const void *memory);
} kiln_api;

/* END OF DECLARATIONS */

/* The function table of a version, or NULL where the library does not know it. Constant; needs no Python; not to be
 * freed. */
KILN_EXPORT const kiln_api *kiln_get_api(uint32_t version);

#ifdef __cplusplus
}
#endif

#endif

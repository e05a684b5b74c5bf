/* The functions of the table: checks that need no Python (null pointers, sizes of structs, nothing opened yet), then the
 * embedded function of the same name, which embedded.py implements.
 */
#include <math.h>

static const kiln_open_params OPEN_DEFAULTS = {.size = sizeof(kiln_open_params)};
static const kiln_request REQUEST_DEFAULTS = {
    .size = sizeof(kiln_request), .tenant = "",       .n = 1,         .timeout = INFINITY,       .max_tokens = INT32_MAX,
    .top_p = 1.0,                 .top_k = INT32_MAX, .repetition_penalty = 1.0};
static const kiln_inference INFERENCE_DEFAULTS = {.size = sizeof(kiln_inference), .timeout = INFINITY};

/* Sizes of the structs in version 1; a later version accepts from these up to its own. */
enum { OPEN_V1 = sizeof(kiln_open_params), REQUEST_V1 = sizeof(kiln_request), INFERENCE_V1 = sizeof(kiln_inference) };

static kiln_status *wrong_size(const char *type, size_t found, size_t oldest, size_t newest) {
  return failure(KILN_INVALID_ARGUMENT,
                 "%s has size %zu; expected %zu to %zu: fill it first with its default function and sizeof, as the "
                 "header of the table's version declares it",
                 type, found, oldest, newest);
}

#define REQUIRE_POINTER(pointer) \
  if ((pointer) == NULL) return failure(KILN_INVALID_ARGUMENT, "%s is null; expected an address", #pointer)
#define REQUIRE_SIZE(type, found, oldest) \
  if ((found) < (oldest) || (found) > sizeof(type)) return wrong_size(#type, found, oldest, sizeof(type))
#define REQUIRE_READY(handle)                                                                                 \
  if (!is_ready())                                                                                            \
  return failure(KILN_INVALID_HANDLE, "%s is %p; nothing was opened in this process yet: call open first", #handle, \
                 (const void *)(handle))

/* Fill as much of a struct as the caller knows. */
#define DEFAULT(type, target, size, oldest, defaults) \
  REQUIRE_POINTER(target);                            \
  REQUIRE_SIZE(type, size, oldest);                   \
  memcpy(target, &(defaults), size);                  \
  (target)->size = size;                              \
  return NULL

/* A struct of the newest version, with what the caller knows and the defaults for the rest. */
#define COMPLETE(type, whole, given, oldest, defaults) \
  REQUIRE_POINTER(given);                              \
  REQUIRE_SIZE(type, (given)->size, oldest);           \
  type whole = defaults;                               \
  memcpy(&(whole), given, (given)->size)

static const char *api_library_version(void) { return KILN_VERSION; }

static kiln_status *api_default_open_params(kiln_open_params *params, size_t size) {
  DEFAULT(kiln_open_params, params, size, OPEN_V1, OPEN_DEFAULTS);
}

static kiln_status *api_default_request(kiln_request *request, size_t size) {
  DEFAULT(kiln_request, request, size, REQUEST_V1, REQUEST_DEFAULTS);
}

static kiln_status *api_default_inference(kiln_inference *inference, size_t size) {
  DEFAULT(kiln_inference, inference, size, INFERENCE_V1, INFERENCE_DEFAULTS);
}

static kiln_status *api_open(const kiln_open_params *params, kiln_engine **engine) {
  REQUIRE_POINTER(engine);
  *engine = NULL;
  COMPLETE(kiln_open_params, whole, params, OPEN_V1, OPEN_DEFAULTS);
  kiln_status *status = start(whole.python_executable, whole.python_path);
  if (status == NULL) status = py_open(&whole, engine);
  static int registered = 0;
  if (status == NULL) close_at_exit(&registered);
  return status;
}

static kiln_status *api_close(kiln_engine *engine) {
  REQUIRE_READY(engine);
  return py_close(engine);
}

static kiln_status *api_describe(kiln_engine *engine, const char **json) {
  REQUIRE_POINTER(json);
  *json = NULL;
  REQUIRE_READY(engine);
  return py_describe(engine, json);
}

static kiln_status *api_metrics(kiln_engine *engine, const char **text) {
  REQUIRE_POINTER(text);
  *text = NULL;
  REQUIRE_READY(engine);
  return py_metrics(engine, text);
}

static kiln_status *api_tokenize(kiln_engine *engine, const char *text, const int32_t **tokens, size_t *count) {
  REQUIRE_POINTER(tokens);
  REQUIRE_POINTER(count);
  *tokens = NULL;
  *count = 0;
  REQUIRE_READY(engine);
  return py_tokenize(engine, text, tokens, count);
}

static kiln_status *api_tokenize_chat(kiln_engine *engine, const char *messages, const int32_t **tokens,
                                      size_t *count) {
  REQUIRE_POINTER(tokens);
  REQUIRE_POINTER(count);
  *tokens = NULL;
  *count = 0;
  REQUIRE_READY(engine);
  return py_tokenize_chat(engine, messages, tokens, count);
}

static kiln_status *api_detokenize(kiln_engine *engine, const int32_t *tokens, size_t count, const char **text) {
  REQUIRE_POINTER(text);
  *text = NULL;
  REQUIRE_READY(engine);
  return py_detokenize(engine, tokens, count, text);
}

static kiln_status *api_submit(kiln_engine *engine, const kiln_request *request, kiln_stream **stream) {
  REQUIRE_POINTER(stream);
  *stream = NULL;
  COMPLETE(kiln_request, whole, request, REQUEST_V1, REQUEST_DEFAULTS);
  REQUIRE_READY(engine);
  return py_submit(engine, &whole, stream);
}

static kiln_status *api_wait(kiln_stream *stream, double timeout, kiln_event *event, const kiln_chunk **chunk) {
  REQUIRE_POINTER(event);
  *event = KILN_NOTHING_YET;
  REQUIRE_POINTER(chunk);
  *chunk = NULL;
  REQUIRE_READY(stream);
  return py_wait(stream, timeout, event, chunk);
}

static kiln_status *api_cancel(kiln_stream *stream) {
  REQUIRE_READY(stream);
  return py_cancel(stream);
}

static kiln_status *api_stream_close(kiln_stream *stream) {
  REQUIRE_READY(stream);
  return py_stream_close(stream);
}

static kiln_status *api_infer(kiln_engine *engine, const kiln_inference *inference, const kiln_outputs **outputs) {
  REQUIRE_POINTER(outputs);
  *outputs = NULL;
  COMPLETE(kiln_inference, whole, inference, INFERENCE_V1, INFERENCE_DEFAULTS);
  REQUIRE_READY(engine);
  kiln_status *status = py_infer(engine, &whole, outputs);
  static int registered = 0;
  if (status == NULL) close_at_exit(&registered);
  return status;
}

static kiln_status *api_release(const void *memory) {
  if (memory == NULL) return NULL;
  REQUIRE_READY(memory);
  return py_release(memory);
}

static const kiln_api VERSION_1 = {
    .version = 1,
    .size = sizeof(kiln_api),
    .library_version = api_library_version,
    .status_code = api_status_code,
    .status_message = api_status_message,
    .status_free = api_status_free,
    .default_open_params = api_default_open_params,
    .default_request = api_default_request,
    .default_inference = api_default_inference,
    .open = api_open,
    .close = api_close,
    .describe = api_describe,
    .metrics = api_metrics,
    .tokenize = api_tokenize,
    .tokenize_chat = api_tokenize_chat,
    .detokenize = api_detokenize,
    .submit = api_submit,
    .wait = api_wait,
    .cancel = api_cancel,
    .stream_close = api_stream_close,
    .infer = api_infer,
    .release = api_release,
};

/* A table that was handed out once keeps its contents: a new version gets one of its own. */
KILN_EXPORT const kiln_api *kiln_get_api(uint32_t version) { return version == 1 ? &VERSION_1 : NULL; }

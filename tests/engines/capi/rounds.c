/* The same work again and again, with every function and with failures, for test_leaks.py to count what is left.
 *
 *   rounds DECODER MODEL PYTHON ROUNDS     DECODER: a bundle without a tokenizer; MODEL: one whose output is 2 x
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kiln.h"

static const kiln_api *kiln;

static void require(kiln_status *status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", kiln->status_message(status));
  exit(1);
}

static void expect(kiln_status *status, kiln_code code) {
  if (kiln->status_code(status) != code) {
    fprintf(stderr, "expected code %d, found %d: %s\n", code, kiln->status_code(status), kiln->status_message(status));
    exit(1);
  }
  kiln->status_free(status);
}

static kiln_engine *open_bundle(const char *bundle, const char *python) {
  kiln_open_params params;
  kiln_engine *engine;
  require(kiln->default_open_params(&params, sizeof params));
  params.bundle = bundle;
  params.python_executable = python;
  params.options = "{\"threads\": 1}";
  require(kiln->open(&params, &engine));
  return engine;
}

static void generate(kiln_engine *engine, int cancel) {
  static const int32_t prompt[] = {3, 1, 4, 1, 5};
  kiln_request request;
  kiln_stream *stream;
  kiln_event event;
  const kiln_chunk *chunk;
  require(kiln->default_request(&request, sizeof request));
  request.tokens = prompt;
  request.token_count = 5;
  request.max_tokens = 6;
  request.n = 2;
  request.ignore_eos = 1;
  request.logprobs = 1;
  request.top_logprobs = 3;
  require(kiln->submit(engine, &request, &stream));
  do {
    require(kiln->wait(stream, INFINITY, &event, &chunk));
    require(kiln->release(chunk));
    if (cancel) require(kiln->cancel(stream));
  } while (event != KILN_END && !cancel);
  require(kiln->stream_close(stream));
  expect(kiln->wait(stream, 0, &event, &chunk), KILN_INVALID_HANDLE);
  request.temperature = -1;
  expect(kiln->submit(engine, &request, &stream), KILN_INVALID_ARGUMENT);
}

static void infer(const char *bundle) {
  static const int64_t shape[] = {1000};
  float data[1000];
  kiln_engine *model = open_bundle(bundle, NULL);
  kiln_inference inference;
  const kiln_outputs *outputs;
  for (int i = 0; i < 1000; ++i) data[i] = (float)i;
  kiln_tensor x = {"x", "float32", shape, 1, data, sizeof data};
  require(kiln->default_inference(&inference, sizeof inference));
  inference.inputs = &x;
  inference.input_count = 1;
  require(kiln->infer(model, &inference, &outputs));
  if (((const float *)outputs->tensors[0].data)[999] != 1998) exit(1);
  require(kiln->release(outputs));
  x.name = "y";
  expect(kiln->infer(model, &inference, &outputs), KILN_INVALID_ARGUMENT);
  require(kiln->close(model));
}

int main(int argc, char **argv) {
  if (argc != 5) return 2;
  kiln = kiln_get_api(KILN_API_VERSION);
  kiln_engine *engine = open_bundle(argv[1], argv[3]), *none;
  for (int round = 0; round < atoi(argv[4]); ++round) {
    kiln_open_params params;
    const char *text;
    const int32_t *tokens;
    size_t count;
    generate(engine, 0);
    generate(engine, 1);
    infer(argv[2]);
    require(kiln->describe(engine, &text));
    require(kiln->release(text));
    expect(kiln->release(text), KILN_INVALID_ARGUMENT);
    require(kiln->metrics(engine, &text));
    require(kiln->release(text));
    expect(kiln->tokenize(engine, "A", &tokens, &count), KILN_INVALID_ARGUMENT);
    expect(kiln->describe(NULL, &text), KILN_INVALID_HANDLE);
    expect(kiln->describe(engine, NULL), KILN_INVALID_ARGUMENT);
    require(kiln->default_open_params(&params, sizeof params));
    params.bundle = "/nowhere";
    expect(kiln->open(&params, &none), KILN_BAD_BUNDLE);
  }
  require(kiln->close(engine));
  return 0;
}

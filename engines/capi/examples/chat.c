/* Answers one question, streaming.
 *
 *   cc -std=c99 chat.c $(pkg-config --cflags --libs kiln) -o chat
 *   ./chat BUNDLE "What is the capital of France?" [MAX_TOKENS [PYTHON]]
 *
 * PYTHON is the interpreter of the environment that Kiln is installed in; by default the one that built the library.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kiln.h"

static const kiln_api *kiln;

/* Print what went wrong, if anything did, and end the program. */
static void require(kiln_status *status) {
  if (status == NULL) return;
  fprintf(stderr, "error %d: %s\n", (int)kiln->status_code(status), kiln->status_message(status));
  kiln->status_free(status);
  exit(1);
}

/* [{"role": "user", "content": question}], to be freed. */
static char *messages_from_question(const char *question) {
  static const char before[] = "[{\"role\": \"user\", \"content\": \"", after[] = "\"}]";
  char *messages = malloc(sizeof before + 6 * strlen(question) + sizeof after), *end = messages;
  if (messages == NULL) exit(1);
  end += sprintf(end, "%s", before);
  for (const char *c = question; *c != '\0'; ++c) {
    if (*c == '"' || *c == '\\')
      end += sprintf(end, "\\%c", *c);
    else if ((unsigned char)*c < 0x20)
      end += sprintf(end, "\\u%04x", (unsigned)*c);
    else
      *end++ = *c;
  }
  strcpy(end, after);
  return messages;
}

int main(int argc, char **argv) {
  if (argc < 3 || argc > 5) {
    fprintf(stderr, "usage: %s BUNDLE QUESTION [MAX_TOKENS [PYTHON]]\n", argv[0]);
    return 2;
  }
  kiln = kiln_get_api(KILN_API_VERSION);
  if (kiln == NULL) {
    fprintf(stderr, "this libkiln does not know version %d of its interface; install a newer one\n", KILN_API_VERSION);
    return 1;
  }
  kiln_open_params params;
  require(kiln->default_open_params(&params, sizeof params));
  params.bundle = argv[1];
  if (argc > 4) params.python_executable = argv[4];
  kiln_engine *engine;
  require(kiln->open(&params, &engine));

  kiln_request request;
  require(kiln->default_request(&request, sizeof request));
  if (argc > 3) request.max_tokens = atoi(argv[3]);
  char *messages = messages_from_question(argv[2]);
  require(kiln->tokenize_chat(engine, messages, &request.tokens, &request.token_count));
  kiln_stream *stream;
  require(kiln->submit(engine, &request, &stream));

  kiln_event event;
  const kiln_chunk *chunk;
  for (;;) {
    require(kiln->wait(stream, INFINITY, &event, &chunk));
    if (event == KILN_END) break;
    fwrite(chunk->text, 1, chunk->text_length, stdout);
    fflush(stdout);
    require(kiln->release(chunk));
  }
  putchar('\n');

  require(kiln->release(request.tokens));
  require(kiln->stream_close(stream));
  require(kiln->close(engine));
  free(messages);
  return 0;
}

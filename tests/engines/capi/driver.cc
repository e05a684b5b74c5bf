// Calls libkiln for conftest.py, from a process that is no Python program.
//
//   driver LIBKILN      loads the library privately (RTLD_LOCAL), as a plugin of some host would
//
// A line on standard input is a call: TAG FUNCTION KEY=VALUE..., separated by tabs, values percent-encoded. Every call
// runs in a thread of its own. A line on standard output is its outcome: TAG ok VALUE... or TAG error CODE MESSAGE.
#include <dlfcn.h>

#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "kiln.h"

namespace {

const kiln_api *kiln;
std::mutex output;

using Arguments = std::map<std::string, std::string>;
using Values = std::vector<std::string>;

struct Failure {
  int code;
  std::string message;
};

void require(kiln_status *status) {
  if (status == nullptr) return;
  Failure failure{kiln->status_code(status), kiln->status_message(status)};
  kiln->status_free(status);
  throw failure;
}

std::vector<std::string> split(const std::string &text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::string decoded(const std::string &text) {
  std::string result;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      result += text[i];
    } else {
      result += static_cast<char>(std::stoi(text.substr(i + 1, 2), nullptr, 16));
      i += 2;
    }
  }
  return result;
}

std::string encoded(const void *data, size_t size) {
  std::string result;
  char code[4];
  for (size_t i = 0; i < size; ++i) {
    std::snprintf(code, sizeof code, "%%%02x", static_cast<const unsigned char *>(data)[i]);
    result += code;
  }
  return result;
}

std::string encoded(const std::string &text) { return encoded(text.data(), text.size()); }

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

std::string joined(const int32_t *tokens, size_t count) {
  std::string result;
  for (size_t i = 0; i < count; ++i) result += (i ? "," : "") + std::to_string(tokens[i]);
  return result;
}

// The arguments of one call, and the memory that they point to while it runs.
struct Call {
  Arguments arguments;

  bool has(const char *name) const { return arguments.count(name) != 0; }
  const std::string &get(const char *name) const { return arguments.at(name); }
  const char *text(const char *name) const { return has(name) ? get(name).c_str() : nullptr; }
  kiln_engine *engine() const { return reinterpret_cast<kiln_engine *>(std::stoull(get("engine"))); }
  kiln_stream *stream() const { return reinterpret_cast<kiln_stream *>(std::stoull(get("stream"))); }

  std::vector<int32_t> tokens() const {
    std::vector<int32_t> result;
    result.reserve(1);  // an address also for no tokens
    for (const auto &token : split(get("tokens"), ',')) result.push_back(static_cast<int32_t>(std::stoll(token)));
    return result;
  }
  // Texts of a list, each encoded once more so that it may have commas.
  std::vector<std::string> texts(const char *name) const {
    std::vector<std::string> result;
    for (const auto &text : split(get(name), ',')) result.push_back(decoded(text));
    return result;
  }
};

Values handle(const void *pointer) { return {std::to_string(reinterpret_cast<uintptr_t>(pointer))}; }

Values lent_text(const char *text) {
  std::string result = encoded(text);
  require(kiln->release(text));
  return {result};
}

Values lent_tokens(const int32_t *tokens, size_t count) {
  std::string result = joined(tokens, count);
  require(kiln->release(tokens));
  return {result};
}

Values open(const Call &call) {
  kiln_open_params params;
  require(kiln->default_open_params(&params, sizeof params));
  params.bundle = call.text("bundle");
  params.options = call.text("options");
  params.python_executable = call.text("python_executable");
  params.python_path = call.text("python_path");
  kiln_engine *engine;
  require(kiln->open(&params, &engine));
  return handle(engine);
}

Values submit(const Call &call) {
  kiln_request r;
  require(kiln->default_request(&r, sizeof r));
  std::vector<int32_t> tokens;
  if (call.has("tokens")) {
    tokens = call.tokens();
    r.tokens = tokens.data();
    r.token_count = tokens.size();
  }
  r.prompt = call.text("prompt");
  r.guide = call.text("guide");
  if (call.has("tenant")) r.tenant = call.text("tenant");
  const std::map<std::string, int32_t *> integers = {
      {"lane", &r.lane},   {"n", &r.n},     {"max_tokens", &r.max_tokens}, {"ignore_eos", &r.ignore_eos},
      {"top_k", &r.top_k}, {"logprobs", &r.logprobs}, {"top_logprobs", &r.top_logprobs}, {"seeded", &r.seeded},
      {"guidance", &r.guidance}};
  for (const auto &[name, field] : integers)
    if (call.has(name.c_str())) *field = static_cast<int32_t>(std::stoll(call.get(name.c_str())));
  const std::map<std::string, double *> reals = {{"timeout", &r.timeout},
                                                 {"temperature", &r.temperature},
                                                 {"top_p", &r.top_p},
                                                 {"min_p", &r.min_p},
                                                 {"frequency_penalty", &r.frequency_penalty},
                                                 {"presence_penalty", &r.presence_penalty},
                                                 {"repetition_penalty", &r.repetition_penalty}};
  for (const auto &[name, field] : reals)
    if (call.has(name.c_str())) *field = std::stod(call.get(name.c_str()));
  if (call.has("seed")) r.seed = std::stoull(call.get("seed"));
  std::vector<std::string> owners[2];
  std::vector<const char *> pointers[2];
  const char *const names[] = {"stop", "choices"};
  for (int i = 0; i < 2; ++i) {
    if (!call.has(names[i])) continue;
    owners[i] = call.texts(names[i]);
    for (const auto &text : owners[i]) pointers[i].push_back(text.c_str());
  }
  r.stop = pointers[0].data();
  r.stop_count = pointers[0].size();
  r.choices = pointers[1].data();
  r.choice_count = pointers[1].size();
  std::vector<kiln_token_bias> bias;
  if (call.has("logit_bias"))
    for (const auto &item : split(call.get("logit_bias"), ',')) {
      const auto parts = split(item, ':');
      bias.push_back({static_cast<int32_t>(std::stoll(parts[0])), std::stof(parts[1])});
    }
  r.logit_bias = bias.data();
  r.logit_bias_count = bias.size();
  kiln_stream *stream;
  require(kiln->submit(call.engine(), &r, &stream));
  return handle(stream);
}

Values wait(const Call &call) {
  kiln_event event;
  const kiln_chunk *chunk;
  require(kiln->wait(call.stream(), std::stod(call.get("timeout")), &event, &chunk));
  if (event != KILN_CHUNK) return {event == KILN_END ? "end" : "nothing"};
  std::string logprobs;
  for (size_t i = 0; i < chunk->logprobs_count; ++i) {
    const kiln_logprobs &position = chunk->logprobs[i];
    if (i) logprobs += ";";
    logprobs += std::to_string(position.chosen.token) + ":" + number(position.chosen.logprob);
    for (size_t k = 0; k < position.top_count; ++k)
      logprobs += "," + std::to_string(position.top[k].token) + ":" + number(position.top[k].logprob);
  }
  Values values = {"chunk",
                   std::to_string(chunk->choice),
                   std::to_string(chunk->finish),
                   joined(chunk->tokens, chunk->token_count),
                   encoded(chunk->text, chunk->text_length),
                   logprobs};
  require(kiln->release(chunk));
  return values;
}

// Inputs are NAME:DTYPE:SHAPE:DATA with the shape as dimensions between 'x', and encoded data.
Values infer(const Call &call) {
  kiln_inference inference;
  require(kiln->default_inference(&inference, sizeof inference));
  std::vector<kiln_tensor> tensors;
  std::vector<std::vector<std::string>> texts;
  std::vector<std::vector<int64_t>> shapes;
  for (const auto &input : split(call.get("inputs"), ',')) {
    texts.push_back(split(input, ':'));
    texts.back().resize(4);
    texts.back()[3] = decoded(texts.back()[3]);
    shapes.emplace_back();
    for (const auto &dimension : split(texts.back()[2], 'x')) shapes.back().push_back(std::stoll(dimension));
  }
  for (size_t i = 0; i < texts.size(); ++i)
    tensors.push_back({texts[i][0].c_str(), texts[i][1].c_str(), shapes[i].data(), shapes[i].size(),
                       texts[i][3].data(), texts[i][3].size()});
  inference.inputs = tensors.data();
  inference.input_count = tensors.size();
  if (call.has("lane")) inference.lane = std::stoi(call.get("lane"));
  if (call.has("timeout")) inference.timeout = std::stod(call.get("timeout"));
  const kiln_outputs *outputs;
  require(kiln->infer(call.engine(), &inference, &outputs));
  Values values;
  for (size_t i = 0; i < outputs->count; ++i) {
    const kiln_tensor &tensor = outputs->tensors[i];
    std::string shape;
    for (size_t axis = 0; axis < tensor.rank; ++axis) shape += (axis ? "x" : "") + std::to_string(tensor.shape[axis]);
    values.push_back(std::string(tensor.name) + ":" + tensor.dtype + ":" + shape + ":" +
                     encoded(tensor.data, tensor.bytes));
  }
  require(kiln->release(outputs));
  return values;
}

const std::map<std::string, std::function<Values(const Call &)>> FUNCTIONS = {
    {"library_version", [](const Call &) { return Values{kiln->library_version()}; }},
    {"open", open},
    {"close",
     [](const Call &call) {
       require(kiln->close(call.engine()));
       return Values{};
     }},
    {"describe",
     [](const Call &call) {
       const char *text;
       require(kiln->describe(call.engine(), &text));
       return lent_text(text);
     }},
    {"metrics",
     [](const Call &call) {
       const char *text;
       require(kiln->metrics(call.engine(), &text));
       return lent_text(text);
     }},
    {"tokenize",
     [](const Call &call) {
       const int32_t *tokens;
       size_t count;
       require(kiln->tokenize(call.engine(), call.text("text"), &tokens, &count));
       return lent_tokens(tokens, count);
     }},
    {"tokenize_chat",
     [](const Call &call) {
       const int32_t *tokens;
       size_t count;
       require(kiln->tokenize_chat(call.engine(), call.text("messages"), &tokens, &count));
       return lent_tokens(tokens, count);
     }},
    {"detokenize",
     [](const Call &call) {
       const auto tokens = call.tokens();
       const char *text;
       require(kiln->detokenize(call.engine(), tokens.data(), tokens.size(), &text));
       return lent_text(text);
     }},
    {"submit", submit},
    {"wait", wait},
    {"cancel",
     [](const Call &call) {
       require(kiln->cancel(call.stream()));
       return Values{};
     }},
    {"stream_close",
     [](const Call &call) {
       require(kiln->stream_close(call.stream()));
       return Values{};
     }},
    {"infer", infer},
    {"release",
     [](const Call &call) {
       require(kiln->release(reinterpret_cast<const void *>(std::stoull(call.get("memory")))));
       return Values{};
     }},
    // For the tests of this process alone.
    {"signals",  // which signals have another action than the default
     [](const Call &) {
       std::string handled;
       for (int signal = 1; signal < NSIG; ++signal) {
         struct sigaction action;
         if (sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_DFL)
           handled += (handled.empty() ? "" : ",") + std::to_string(signal);
       }
       return Values{handled};
     }},
    {"raise_sigint",
     [](const Call &) {
       std::raise(SIGINT);
       return Values{};
     }},
};

volatile std::sig_atomic_t interrupts = 0;

void run(const std::string &line) {
  auto words = split(line, '\t');
  Call call;
  for (size_t i = 2; i < words.size(); ++i) {
    const size_t equals = words[i].find('=');
    call.arguments[words[i].substr(0, equals)] = decoded(words[i].substr(equals + 1));
  }
  std::string outcome = words[0];
  try {
    Values values = FUNCTIONS.at(words[1])(call);
    outcome += "\tok";
    for (const auto &value : values) outcome += "\t" + value;
  } catch (const Failure &failure) {
    outcome += "\terror\t" + std::to_string(failure.code) + "\t" + encoded(failure.message);
  } catch (const std::exception &error) {
    outcome += "\tbroken\t" + std::string(error.what());
  }
  std::lock_guard<std::mutex> lock(output);
  std::cout << outcome << std::endl;
}

}  // namespace

int main(int, char **argv) {
  std::signal(SIGINT, [](int) { interrupts = interrupts + 1; });
  void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  kiln = reinterpret_cast<decltype(&kiln_get_api)>(dlsym(library, "kiln_get_api"))(KILN_API_VERSION);
  std::vector<std::thread> threads;
  for (std::string line; std::getline(std::cin, line);) threads.emplace_back(run, line);
  for (auto &thread : threads) thread.join();
  std::fprintf(stderr, "%d\n", static_cast<int>(interrupts));
  return 0;
}

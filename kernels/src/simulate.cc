// The simulator's event loop as Python calls it; see recjax/lab/simulate/compiled.py.
#include "simulate.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>

#define RECJAX_API extern "C" __attribute__((visibility("default")))
using recjax::simulate::Engine;

// Rises when what follows changes, together with the number in recjax/lab/simulate/compiled.py.
RECJAX_API int32_t recjax_simulator_interface() { return 1; }

// `whole`: links, actors, endpoint ticks, copy ticks, congestion, TCP, whether an actor is one rank, whether senders
// have a window of their own, buffers, timeout ticks. `real`: the largest window, a segment at most, the
// first window, the room of a buffer, all in bytes. Of each link its latency in ticks, the buffer before it (-1: none),
// and the ports that it stands for.
RECJAX_API Engine* recjax_simulator_new(const int64_t* whole, const double* real, const int64_t* latency,
                                        const int32_t* buffer_of, const double* ports) {
  auto* engine = new Engine();
  const int64_t links = whole[0];
  engine->actors = whole[1];
  engine->endpoint = whole[2];
  engine->copy = whole[3];
  engine->congestion = whole[4];
  engine->tcp = whole[5];
  engine->alone = whole[6];
  engine->own_window = whole[7];
  engine->buffers.resize(whole[8]);
  engine->timeout = whole[9];
  engine->most_window = real[0];
  engine->segment = real[1];
  engine->first_window = real[2];
  engine->room = real[3];
  engine->latency.assign(latency, latency + links);
  engine->buffer_of.assign(buffer_of, buffer_of + links);
  engine->ports.assign(ports, ports + links);
  engine->free.resize(links);
  engine->bytes_on.resize(links);
  engine->outputs.resize(links);
  return engine;
}

RECJAX_API void recjax_simulator_delete(Engine* engine) { delete engine; }

// Returns the program's number. `connections`: that this and earlier programs use. `first`, `receives`: as in Program.
// Of each message in `whole` its number of links, receiver, connection, segments and the ticks of an acknowledgement,
// and in `sizes` the bytes of a segment; `links` and `ticks` of all messages, one after the other.
RECJAX_API int64_t recjax_simulator_program(Engine* engine, int64_t steps, bool starts_with_delay, bool sender_waits,
                                            int64_t stride, int64_t connections, const int64_t* first,
                                            const int32_t* receives, const int64_t* whole, const double* sizes,
                                            const int32_t* links, const int64_t* ticks) {
  auto program = std::make_unique<recjax::simulate::Program>();
  const int64_t places = steps * engine->actors, count = first[places];
  program->steps = steps;
  program->starts_with_delay = starts_with_delay;
  program->sender_waits = sender_waits;
  program->stride = stride;
  program->first.assign(first, first + places + 1);
  program->receives.assign(receives, receives + places);
  int64_t all = 0;
  for (int64_t i = 0; i < count; ++i) all += whole[5 * i];
  program->links.assign(links, links + all);
  program->ticks.assign(ticks, ticks + all);
  all = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* of = whole + 5 * i;
    program->messages.push_back({program->links.data() + all, program->ticks.data() + all, int32_t(of[0]),
                                 int32_t(of[1]), int32_t(of[2]), int32_t(of[3]), sizes[i], of[4]});
    all += of[0];
  }
  const recjax::simulate::Connection unused{engine->first_window, INFINITY, 0, {}, {}, false};
  engine->connections.resize(connections, unused);
  engine->programs.push_back(std::move(program));
  return engine->programs.size() - 1;
}

// Returns the run's number.
RECJAX_API int64_t recjax_simulator_run(Engine* engine, int64_t program, int64_t label) {
  const int64_t number = engine->runs.size();
  engine->runs.push_back({engine->programs[program].get(), label, number, {}, {}, {}});
  return number;
}

// Lets go of what only a run under way needs.
RECJAX_API void recjax_simulator_forget(Engine* engine, int64_t run) {
  recjax::simulate::Run& done = engine->runs[run];
  done = {done.program, done.label, done.number, {}, {}, {}};
}

// Returns true if the actor is through at once.
RECJAX_API bool recjax_simulator_begin(Engine* engine, int64_t run, int32_t actor) {
  engine->Begin(&engine->runs[run], actor);
  return engine->through != nullptr;
}

// `number` comes back from recjax_simulator_play at that time.
RECJAX_API void recjax_simulator_at(Engine* engine, int64_t time, int64_t label, int32_t actor, int64_t number) {
  engine->Push({time, label, ++engine->serial, actor, 0, 0, recjax::simulate::kCall, nullptr, nullptr, number});
}

// See Engine::Play. `found`: a number, an actor, and the time.
RECJAX_API int32_t recjax_simulator_play(Engine* engine, int64_t* found) {
  int32_t actor = 0;
  const int32_t kind = engine->Play(&found[0], &actor);
  found[1] = actor;
  found[2] = engine->now;
  return kind;
}

// `counts`: events and lost segments; of each link the bytes that it has served.
RECJAX_API void recjax_simulator_state(const Engine* engine, int64_t* counts, double* bytes_on) {
  counts[0] = engine->events;
  counts[1] = engine->lost;
  std::copy(engine->bytes_on.begin(), engine->bytes_on.end(), bytes_on);
}

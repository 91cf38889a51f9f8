#ifndef RECJAX_SIMULATE_H_
#define RECJAX_SIMULATE_H_

// The event loop of the simulator, with messages as a whole or cut up by TCP. It takes the steps, in the order,
// of recjax/lab/simulate/engine.py and tcp.py, where everything is explained: every time is the same integer, and every
// number of bytes is summed in the same order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

namespace recjax::simulate {

constexpr int64_t kHops = 4096;                 // as HOPS
constexpr int64_t kLatest = int64_t{1} << 61;   // of all times: the sum of two is no overflow
constexpr double kSlack = 1 + 1e-12;            // but for rounding

// A queue whose items lie side by side: there are many, most of them short.
template <typename T>
class Fifo {
 public:
  bool empty() const { return first_ == items_.size(); }
  const T& front() const { return items_[first_]; }
  void push(const T& item) { items_.push_back(item); }
  void pop() {
    if (++first_ == items_.size()) {
      items_.clear();
      first_ = 0;
    } else if (first_ >= 32 && first_ * 2 >= items_.size()) {
      items_.erase(items_.begin(), items_.begin() + first_);
      first_ = 0;
    }
  }

 private:
  std::vector<T> items_;
  size_t first_ = 0;
};

// A message, or one segment of it, on its way.
struct Message {
  const int32_t* links;
  const int64_t* ticks;
  int32_t hops, receiver, connection, count;  // count: segments
  double size;                                // bytes of a segment
  int64_t back;                               // ticks of an acknowledgement's way
};

struct Program {
  int32_t steps;
  bool starts_with_delay, sender_waits;
  int64_t stride;                // labels of a step
  std::vector<int64_t> first;    // of step s and actor a at [s * actors + a]: its messages are from here to the next
  std::vector<int32_t> receives;  // likewise: arrivals to wait for
  std::vector<Message> messages;
  std::vector<int32_t> links;
  std::vector<int64_t> ticks;
};

struct Run {
  const Program* program;
  int64_t label, number;
  std::vector<int32_t> missing, waiting;
  std::vector<int64_t> latest;
};

enum Kind : int8_t { kMessage, kResume, kCopied, kCall, kWoken, kAgain };

struct Event {
  int64_t time, label, serial;
  int32_t actor, step, hop;
  Kind kind;
  Run* run;
  const Message* message;
  int64_t what;  // of a call its number, of a wake-up the connection, of a segment where its message's count is, or -1
  bool operator>(const Event& other) const {
    if (time != other.time) return time > other.time;
    if (label != other.label) return label > other.label;
    if (actor != other.actor) return actor > other.actor;
    return serial > other.serial;
  }
};

struct Waiting {
  int64_t label;
  int32_t actor, step;
  Run* run;
  const Message* message;
  int64_t left;
};

struct Connection {
  double window, threshold = INFINITY, flying = 0;
  Fifo<std::pair<int64_t, double>> acks;
  Fifo<Waiting> queue;
  bool waking = false;
};

struct Buffer {
  double held = 0;
  std::priority_queue<std::pair<int64_t, double>, std::vector<std::pair<int64_t, double>>, std::greater<>> leaving;

  bool Take(int64_t now, int64_t until, double size, double room) {
    while (!leaving.empty() && leaving.top().first <= now) {
      held -= leaving.top().second;
      leaving.pop();
    }
    if (leaving.empty()) held = 0;
    const bool fits = held + size <= room;
    if (fits) {
      held += size;
      leaving.emplace(until, size);
    }
    return fits;
  }
};

struct Engine {
  // Given by Python; see recjax_simulator_new.
  int32_t actors;
  int64_t endpoint, copy;
  bool congestion, tcp, alone;  // alone: each actor is one rank
  double most_window, segment, first_window, room;
  bool own_window;
  int64_t timeout;

  std::vector<int64_t> latency, free;
  std::vector<double> bytes_on, ports;
  std::vector<int32_t> buffer_of;
  std::vector<Buffer> buffers;
  std::vector<Connection> connections;
  std::vector<std::unique_ptr<Program>> programs;
  std::deque<Run> runs;
  std::vector<Event> heap;  // of each link only what comes out of it next
  std::vector<Fifo<Event>> outputs;
  std::vector<int32_t> left;  // segments that are not there yet, of messages of several
  int64_t now = 0, serial = 0, events = 0, lost = 0;
  bool late = false, asymmetric = false;
  Run* through = nullptr;  // with which an actor has come through in this step of the loop

  void Push(const Event& event) {
    late |= event.time > kLatest;
    heap.push_back(event);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  }

  // In place of the first event.
  void Replace(const Event& event) {
    late |= event.time > kLatest;
    const size_t size = heap.size();
    size_t at = 0;
    for (size_t child = 1; child < size; child = 2 * at + 1) {
      if (child + 1 < size && heap[child] > heap[child + 1]) ++child;
      if (!(event > heap[child])) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = event;
  }

  void Pop() {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
  }

  void ResumeAt(int64_t time, Run* run, int32_t actor, int32_t step, Kind kind = kResume) {
    const int64_t label = run->label + (step + 2) * run->program->stride - 1;
    Push({time, label, 0, actor, step, 0, kind, run, nullptr, 0});
  }

  void Begin(Run* run, int32_t actor) {
    const Program& program = *run->program;
    through = nullptr;
    if (run->waiting.empty()) {
      run->missing = program.receives;
      run->latest.assign(run->missing.size(), 0);
      run->waiting.assign(actors, -1);
    }
    if (program.starts_with_delay && program.steps && endpoint) {
      ResumeAt(now + endpoint, run, actor, -1);
    } else {
      NextStep(run, actor, -1, now, false);
    }
  }

  void NextStep(Run* run, int32_t actor, int32_t step, int64_t time, bool copied) {
    const Program& program = *run->program;
    for (++step; step < program.steps; ++step) {
      const int64_t at = int64_t{step} * actors + actor;
      if (program.first[at] < program.first[at + 1]) {
        if (copy && !copied) return ResumeAt(time + copy, run, actor, step - 1, kCopied);
        Send(run, actor, step, time);
      }
      copied = false;
      if (!program.receives[at]) continue;
      if (run->missing[at]) {
        run->waiting[actor] = step;
        return;
      }
      const int64_t ready = run->latest[at] + endpoint;
      if (ready > time) return ResumeAt(ready, run, actor, step);
    }
    through = run;
  }

  void Send(Run* run, int32_t actor, int32_t step, int64_t time) {
    const Program& program = *run->program;
    const int64_t at = int64_t{step} * actors + actor;
    int64_t label = run->label + step * program.stride;
    for (int64_t i = program.first[at]; i < program.first[at + 1]; ++i, label += kHops) {
      const Message* message = &program.messages[i];
      if (tcp) {
        int64_t counter = -1;
        if (message->count > 1) {
          counter = left.size();
          left.push_back(message->count);
        }
        Connection& connection = connections[message->connection];
        for (int32_t k = 0; k < message->count; ++k) {
          connection.queue.push({label, actor, step, run, message, counter});
        }
        PushQueue(message->connection, time);
      } else if (congestion) {
        Enter(time, label, actor, run, message, step, 0, -1);
      } else {
        int64_t slowest = 0, way = 0;
        for (int32_t hop = 0; hop < message->hops; ++hop) {
          const int32_t link = message->links[hop];
          bytes_on[link] += message->size;
          slowest = std::max(slowest, message->ticks[hop]);
          way += latency[link];
        }
        Deliver(run, step, actor, message->receiver, time + slowest + way);
      }
    }
  }

  void PushQueue(int32_t number, int64_t time) {
    Connection& connection = connections[number];
    while (!connection.acks.empty() && connection.acks.front().first <= time) {
      const double size = connection.acks.front().second;
      connection.acks.pop();
      connection.flying -= size;
      if (connection.window < most_window) {
        const bool slow = connection.window >= connection.threshold;
        connection.window += slow ? segment * size / connection.window : size;
        connection.window = std::min(connection.window, most_window);
      }
    }
    if (connection.acks.empty() && connection.flying < 1e-6) connection.flying = 0;
    while (!connection.queue.empty()) {
      const Waiting next = connection.queue.front();
      const double size = next.message->size;
      if (connection.flying && connection.flying + size > connection.window * kSlack) return Wake(number);
      connection.flying += size;
      connection.queue.pop();
      Enter(time, next.label, next.actor, next.run, next.message, next.step, 0, next.left);
    }
  }

  void Wake(int32_t number) {
    Connection& connection = connections[number];
    if (connection.acks.empty() || connection.waking) return;
    connection.waking = true;
    const Waiting& next = connection.queue.front();
    Push({connection.acks.front().first, next.label, ++serial, next.actor, 0, 0, kWoken, nullptr, nullptr, number});
  }

  void Enter(int64_t time, int64_t label, int32_t actor, Run* run, const Message* message, int32_t step, int32_t hop,
             int64_t counter) {
    const int32_t link = message->links[hop];
    int64_t end = std::max(free[link], time) + message->ticks[hop];
    if (tcp && buffer_of[link] >= 0) {
      const volatile double size = message->size * ports[link];  // rounded: to be added by itself
      if (!buffers[buffer_of[link]].Take(time, end, size, room)) {
        return Lose(time, label, actor, run, message, step, hop, counter);
      }
    }
    free[link] = end;
    bytes_on[link] += message->size;
    end += latency[link];
    if (end > kLatest) late = true, end = kLatest;
    if (++hop < message->hops) {
      const Event event{end, label, tcp ? ++serial : 0, actor, step, hop, kMessage, run, message, counter};
      if (outputs[link].empty()) Push(event);
      outputs[link].push(event);
      return;
    }
    if (tcp) {
      Connection& connection = connections[message->connection];
      connection.acks.push({end + message->back, message->size});
      if (!connection.queue.empty()) Wake(message->connection);
      if (counter >= 0 && --left[counter]) {
        int64_t& latest = run->latest[int64_t{step} * actors + message->receiver];
        latest = std::max(latest, end);
        return;
      }
    }
    Deliver(run, step, actor, message->receiver, end);
  }

  void Lose(int64_t time, int64_t label, int32_t actor, Run* run, const Message* message, int32_t step, int32_t hop,
            int64_t counter) {
    if (!alone) {
      asymmetric = true;
      return;
    }
    ++lost;
    if (own_window) {
      Connection& connection = connections[message->connection];
      connection.threshold = std::max(connection.window / 2, 2 * segment);
      connection.window = segment;
    }
    Push({time + timeout, label, ++serial, actor, step, hop, kAgain, run, message, counter});
  }

  void Deliver(Run* run, int32_t step, int32_t sender, int32_t receiver, int64_t time) {
    Arrive(run, step, receiver, time);
    if (run->program->sender_waits) Arrive(run, step, sender, time);
  }

  void Arrive(Run* run, int32_t step, int32_t actor, int64_t time) {
    const int64_t at = int64_t{step} * actors + actor;
    run->latest[at] = std::max(run->latest[at], time);
    if (--run->missing[at] == 0 && run->waiting[actor] == step) {
      run->waiting[actor] = -1;
      ResumeAt(run->latest[at] + endpoint, run, actor, step);
    }
  }

  // Plays until Python has to do something. Returns 0: nothing is left, 1 a call (its number in `number`), 2 an actor
  // is through with a run (its number), 3 a time is too large, 4 the ranks are no longer alike.
  int32_t Play(int64_t* number, int32_t* actor) {
    while (!heap.empty()) {
      if (late) return 3;
      if (asymmetric) return 4;
      const Event event = heap.front();
      now = event.time;
      ++events;
      if (event.kind == kMessage) {
        Fifo<Event>& output = outputs[event.message->links[event.hop - 1]];
        output.pop();
        if (output.empty()) {
          Pop();
        } else {
          Replace(output.front());
        }
        Enter(now, event.label + 1, event.actor, event.run, event.message, event.step, event.hop, event.what);
        continue;
      }
      Pop();
      *actor = event.actor;
      if (event.kind == kCall) {
        *number = event.what;
        return 1;
      }
      if (event.kind == kWoken) {
        connections[event.what].waking = false;
        PushQueue(event.what, now);
      } else if (event.kind == kAgain) {
        Enter(now, event.label - event.hop, event.actor, event.run, event.message, event.step, 0, event.what);
      } else {
        through = nullptr;
        NextStep(event.run, event.actor, event.step, now, event.kind == kCopied);
        if (!through) continue;
        *number = through->number;
        return 2;
      }
    }
    return late ? 3 : asymmetric ? 4 : 0;
  }
};

}  // namespace recjax::simulate

#endif  // RECJAX_SIMULATE_H_

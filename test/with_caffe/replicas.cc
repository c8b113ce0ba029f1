// Trains as `caffe train` does, and writes what every rank has at the beginning of each iteration and at the end to
// replica<rank>.bin: `replicas SOLVER[,SOLVER...] float|double [RANK:ITERATION:snapshot|stop|hold]`. Of several
// solvers, which are trained one after the other, that is the last one. A rank that holds appends that it is `waiting`
// to <rank>.notes, and waits for a file named struck. .ci/caffe.py builds it among Caffe's tools.
#include <unistd.h>

#include <caffe/caffe.hpp>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace {

using caffe::PerseusWorld;

// What one rank's user asks for, once.
struct Wish {
  int rank = -1, iteration = 0;
  caffe::SolverAction::Enum action = caffe::SolverAction::NONE;  // to hold
};

Wish parse(const std::string& text) {
  Wish wish;
  char action[16] = "";
  CHECK_EQ(std::sscanf(text.c_str(), "%d:%d:%15s", &wish.rank, &wish.iteration, action), 3) << text;
  if (action == std::string("stop")) wish.action = caffe::SolverAction::STOP;
  if (action == std::string("snapshot")) wish.action = caffe::SolverAction::SNAPSHOT;
  return wish;
}

void hold(int rank) {
  std::ofstream(std::to_string(rank) + ".notes", std::ios::app) << "{\"event\": \"waiting\"}" << std::endl;
  while (access("struck", F_OK) != 0) usleep(10000);
}

template <typename T>
class Recorder : public caffe::Solver<T>::Callback {
 public:
  explicit Recorder(caffe::Net<T>* net)
      : net_(*net), file_("replica" + std::to_string(PerseusWorld::rank()) + ".bin", std::ios::binary) {}

  void record() {
    for (const caffe::Blob<T>* blob : net_.learnable_params()) {
      file_.write(reinterpret_cast<const char*>(blob->cpu_data()),
                  static_cast<std::streamsize>(blob->count() * sizeof(T)));
    }
    CHECK(file_.flush());
  }

 protected:
  void on_start() override { record(); }
  void on_gradients_ready() override {}

 private:
  const caffe::Net<T>& net_;
  std::ofstream file_;
};

template <typename T>
void train(const std::string& file, const Wish& wish) {
  caffe::SolverParameter parameters;
  caffe::ReadSolverParamsFromTextFileOrDie(file, &parameters);
  if (PerseusWorld::rank() > 0) {
    parameters.clear_test_iter();
    parameters.clear_test_interval();
  }
  boost::shared_ptr<caffe::Solver<T>> solver(caffe::SolverRegistry<T>::CreateSolver(parameters));
  bool asked = wish.rank != PerseusWorld::rank();
  const auto action = [&]() {
    if (asked || solver->iter() != wish.iteration) return caffe::SolverAction::NONE;
    asked = true;
    if (wish.action == caffe::SolverAction::NONE) hold(wish.rank);
    return wish.action;
  };
  Recorder<T> recorder(solver->net().get());
  solver->add_callback(&recorder);
  caffe::Perseus<T>(solver, action, "").Run();
  recorder.record();
}

}  // namespace

int main(int argc, char** argv) {
  caffe::GlobalInit(&argc, &argv);
  FLAGS_alsologtostderr = true;
  CHECK(argc == 3 || argc == 4) << "replicas SOLVER[,SOLVER...] float|double [RANK:ITERATION:snapshot|stop|hold]";
  PerseusWorld::Join();
  const int rank = PerseusWorld::rank(), size = PerseusWorld::size(), local_rank = PerseusWorld::local_rank();
  caffe::Caffe::set_solver_count(size);
  caffe::Caffe::set_solver_rank(rank);
  caffe::Caffe::set_multiprocess(true);
  const Wish wish = argc == 4 ? parse(argv[3]) : Wish();
  std::istringstream solvers(argv[1]);
  for (std::string file; std::getline(solvers, file, ',');) {
    if (argv[2] == std::string("double")) {
      train<double>(file, wish);
    } else {
      train<float>(file, wish);
    }
  }
  PerseusWorld::Leave();
  // Threads that read data may still ask.
  CHECK_EQ(PerseusWorld::rank(), rank);
  CHECK_EQ(PerseusWorld::size(), size);
  CHECK_EQ(PerseusWorld::local_rank(), local_rank);
  return 0;
}

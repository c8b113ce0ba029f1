// Names for clang's thread-safety attributes: `make check-locks` reads the core with -Wthread-safety, which turns
// "called with the lock held" into an error of the compiler. Other compilers see nothing.
// See https://clang.llvm.org/docs/ThreadSafetyAnalysis.html.
#pragma once

#if defined(__clang__)
#define PERSEUS_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define PERSEUS_THREAD_ATTRIBUTE(x)
#endif

// A type that can be held, and one whose objects hold such a thing while they live.
#define PERSEUS_CAPABILITY(name) PERSEUS_THREAD_ATTRIBUTE(capability(name))
#define PERSEUS_SCOPED_CAPABILITY PERSEUS_THREAD_ATTRIBUTE(scoped_lockable)
// Data that may be touched, and functions that may be called, only while `x` is held.
#define PERSEUS_GUARDED_BY(x) PERSEUS_THREAD_ATTRIBUTE(guarded_by(x))
#define PERSEUS_REQUIRES(...) PERSEUS_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
// Functions that may be called only while it is not held, that take it, that take it where they return `result`, that
// give it back.
#define PERSEUS_EXCLUDES(...) PERSEUS_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define PERSEUS_ACQUIRE(...) PERSEUS_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define PERSEUS_TRY_ACQUIRE(result, ...) PERSEUS_THREAD_ATTRIBUTE(try_acquire_capability(result, __VA_ARGS__))
#define PERSEUS_RELEASE(...) PERSEUS_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
// A function that returns a reference to the mutex `x`.
#define PERSEUS_RETURN_CAPABILITY(x) PERSEUS_THREAD_ATTRIBUTE(lock_returned(x))
// A body that is not looked into: say why beside it.
#define PERSEUS_NO_THREAD_ANALYSIS PERSEUS_THREAD_ATTRIBUTE(no_thread_safety_analysis)

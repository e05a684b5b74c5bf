/* Starting Python and the embedded code, in plain C.
 *
 * Not by cffi's own start-up, for two reasons. Here the parameters of `open` decide where Python is found, and neither
 * the environment nor signals are touched. And cffi's, to be safe beside other libraries that embed Python, borrows a
 * field of Python's capsule type as a lock, which in Python 3.11 stops the process for good once anybody (torch does)
 * has looked up an attribute of a capsule. So the library is compiled as a plain cffi extension module, and made one
 * here. Python is never finalised: extension modules do not survive that.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t start_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all but `ready` */
static int ready = 0;                                          /* embedded.py is connected */
static char *started_with = NULL;                              /* the executable, if Python was started here */
static char *cannot_start = NULL;                              /* why; Python can be started only once in a process */

static int is_ready(void) { return __atomic_load_n(&ready, __ATOMIC_ACQUIRE); }

/* A program may have loaded this library privately (dlopen); Python's own modules look for its symbols globally. */
static void show_python_symbols(void) {
  Dl_info info;
  if (dladdr((void *)&Py_IsInitialized, &info) != 0) dlopen(info.dli_fname, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
}

static PyStatus initialize_python(const char *executable) {
  PyPreConfig before;
  PyPreConfig_InitIsolatedConfig(&before); /* no environment variables; the program's locale stays as it is */
  before.utf8_mode = 1;
  PyStatus status = Py_PreInitialize(&before);
  if (PyStatus_Exception(status)) return status;
  PyConfig config;
  PyConfig_InitIsolatedConfig(&config); /* no signal handlers, no command line, no user site */
  status = PyConfig_SetBytesString(&config, &config.executable, executable);
  if (!PyStatus_Exception(status)) status = PyConfig_SetBytesString(&config, &config.program_name, executable);
  if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
  PyConfig_Clear(&config);
  return status;
}

static kiln_status *start_python(const char *executable) {
  if (cannot_start != NULL) return failure(KILN_NO_PYTHON, "%s", cannot_start);
  if (executable == NULL) executable = KILN_PYTHON;
  struct stat file;
  if (stat(executable, &file) != 0 || !S_ISREG(file.st_mode) || access(executable, X_OK) != 0)
    return failure(KILN_NO_PYTHON,
                   "%s is no program that can be run; give in python_executable the Python " KILN_PYTHON_VERSION
                   " of the environment that Kiln is installed in",
                   executable);
  show_python_symbols();
  PyStatus status = initialize_python(executable);
  if (PyStatus_Exception(status)) {
    char message[1024];
    snprintf(message, sizeof message,
             "Python " KILN_PYTHON_VERSION " cannot be started with %s: %s; correct python_executable and start the "
             "program again",
             executable, status.err_msg ? status.err_msg : "it wanted to exit");
    cannot_start = strdup(message);
    return failure(KILN_NO_PYTHON, "%s", message);
  }
  started_with = strdup(executable);
  PyEval_SaveThread();
  return NULL;
}

/* The text of the current exception, which is cleared. The GIL is held. */
static kiln_status *python_failure(const char *attempt) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject *text = value == NULL ? NULL : PyObject_Str(value);
  const char *message = text == NULL ? NULL : PyUnicode_AsUTF8(text);
  PyObject *program = PySys_GetObject("executable"); /* borrowed */
  const char *where = program == NULL ? NULL : PyUnicode_AsUTF8(program);
  kiln_status *status = failure(
      KILN_NO_PYTHON,
      "%s: %s: %s. Python is %s; give in python_executable that of the environment that Kiln is installed in, with "
      "the extra 'capi' (pip install 'kiln-engine[capi,cpu]'), or the folders of its packages in python_path",
      attempt, type == NULL ? "error" : ((PyTypeObject *)type)->tp_name, message == NULL ? "unknown" : message,
      where == NULL ? "unknown" : where);
  PyErr_Clear();
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return status;
}

/* Put the folders of `path` before all others, in their order, once each. The GIL is held; 0: done. */
static int search_first(const char *path) {
  PyObject *folders = PySys_GetObject("path"); /* borrowed */
  PyObject *text = PyUnicode_DecodeFSDefault(path);
  PyObject *colon = PyUnicode_FromString(":");
  PyObject *wanted = text && colon ? PyUnicode_Split(text, colon, -1) : NULL;
  int failed = wanted == NULL || folders == NULL;
  for (Py_ssize_t at = failed ? 0 : PyList_Size(wanted); at-- > 0 && !failed;) {
    PyObject *folder = PyList_GetItem(wanted, at); /* borrowed */
    int known = PyUnicode_GetLength(folder) == 0 ? 1 : PySequence_Contains(folders, folder);
    failed = known < 0 || (known == 0 && PyList_Insert(folders, 0, folder) != 0);
  }
  Py_XDECREF(wanted);
  Py_XDECREF(colon);
  Py_XDECREF(text);
  return failed;
}

/* Make embedded.py's functions those that table.c calls. The GIL is held; 0: done, else there is an exception. */
static int connect_embedded(void) {
  static PyObject *module = NULL; /* this library as an extension module, which has `ffi` and `lib` */
  if (module == NULL) module = PyInit__kiln_embedded();
  if (module == NULL) return 1;
  PyObject *ffi = PyObject_GetAttrString(module, "ffi");
  PyObject *lib = ffi == NULL ? NULL : PyObject_GetAttrString(module, "lib");
  PyObject *embedded = lib == NULL ? NULL : PyImport_ImportModule("engines.capi.embedded");
  PyObject *result =
      embedded == NULL ? NULL : PyObject_CallMethod(embedded, (char *)"connect", (char *)"OO", ffi, lib);
  int failed = result == NULL;
  Py_XDECREF(result);
  Py_XDECREF(embedded);
  Py_XDECREF(lib);
  Py_XDECREF(ffi);
  return failed;
}

static kiln_status *import_kiln(const char *path) {
  kiln_status *status = NULL;
  PyGILState_STATE state = PyGILState_Ensure();
  if (path != NULL && search_first(path) != 0) {
    status = python_failure("python_path cannot be used");
  } else if (!is_ready()) {
    if (connect_embedded() != 0)
      status = python_failure("Kiln cannot be imported");
    else
      __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
  }
  PyGILState_Release(state);
  return status;
}

static kiln_status *start_locked(const char *executable, const char *path) {
  kiln_status *status = NULL;
  if (!Py_IsInitialized()) {
    status = start_python(executable);
  } else if (strncmp(Py_GetVersion(), KILN_PYTHON_VERSION ".", strlen(KILN_PYTHON_VERSION ".")) != 0) {
    status = failure(KILN_NO_PYTHON,
                     "this process runs Python %.8s, the library was built for " KILN_PYTHON_VERSION
                     "; build it again (kiln capi build) with that Python",
                     Py_GetVersion());
  } else if (executable != NULL && (started_with == NULL || strcmp(executable, started_with) != 0)) {
    status = failure(KILN_INVALID_ARGUMENT,
                     "Python runs in this process already, from %s; python_executable is %s: leave it NULL, or "
                     "start the program again with that one",
                     started_with == NULL ? "the program itself" : started_with, executable);
  }
  return status == NULL ? import_kiln(path) : status;
}

static kiln_status *start(const char *executable, const char *path) {
  pthread_mutex_lock(&start_lock);
  kiln_status *status = start_locked(executable, path);
  pthread_mutex_unlock(&start_lock);
  return status;
}

static void close_all_at_exit(void) {
  if (Py_IsInitialized()) py_close_all();
}

/* A step must not outlive the libraries that it runs in. They make some of what they clean up at the end of the program
 * when they are first used, and the end goes backwards: so this is called, with a flag for each place, after an engine
 * has computed something, and its handler goes first. A program that is Python itself closes engines when it ends. */
static void close_at_exit(int *registered) {
  pthread_mutex_lock(&start_lock);
  if (!*registered && started_with != NULL) *registered = atexit(close_all_at_exit) == 0;
  pthread_mutex_unlock(&start_lock);
}

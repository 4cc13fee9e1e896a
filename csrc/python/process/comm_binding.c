/* A transport comes as a capsule named "smp.transport" around its table. */
#define PY_SSIZE_T_CLEAN
#include "python/process/comm_binding.h"

#include "comm/messaging/comm.h"
#include "comm/transport/connecting/address.h"
#include "comm/transport/transport.h"
#include "comm/transport/ucx/library.h"

PyObject *
smp_python_no_room(const char *doing, size_t pool)
{
    return PyErr_Format(
        PyExc_MemoryError,
        "smp: %s: out of memory: the pools of the ranks of this host, of %zu MiB here, "
        "have to fit into the address space (ulimit -v): set comm_pool_bytes to less "
        "[%s]",
        doing, pool >> 20, smp_status_name(SMP_ERR_NO_MEMORY));
}

/* register_transport(capsule): the sessions opened from now on may use it */
static PyObject *
register_transport(PyObject *module, PyObject *capsule)
{
    const smp_transport *transport = PyCapsule_GetPointer(capsule, "smp.transport");
    smp_status           status;

    (void)module;
    if (transport == NULL) {
        return NULL;
    }
    status = smp_transport_register(transport);
    if (status != SMP_OK) {
        PyErr_Format(PyExc_RuntimeError,
                     "smp: the transport %s does not belong to this build of the core: "
                     "build both again [%s]",
                     transport->name, smp_status_name(status));
        return NULL;
    }
    Py_RETURN_NONE;
}

/* load_ucx(path) -> "1.22.0"; path: where a package has libucp.so.0, or None */
static PyObject *
load_ucx(PyObject *module, PyObject *arg)
{
    const smp_ucp *ucp;
    const char    *path = NULL;
    smp_status     status = SMP_OK;

    (void)module;
    if (arg != Py_None) {
        path = PyUnicode_AsUTF8(arg);
        if (path == NULL) {
            return NULL;
        }
        status = smp_ucx_packaged(path);
        if (status != SMP_OK) {
            return PyErr_NoMemory();
        }
    }
    Py_BEGIN_ALLOW_THREADS;
    status = smp_ucx_library(&ucp);
    Py_END_ALLOW_THREADS;
    if (status != SMP_OK) {
        PyErr_SetString(PyExc_OSError, smp_ucx_trouble());
        return NULL;
    }
    return PyUnicode_FromString(ucp->ucp_get_version_string());
}

/* addresses(interface) -> ["eth0 10.0.0.7/24", ...]; None: of all interfaces */
static PyObject *
addresses(PyObject *module, PyObject *arg)
{
    smp_tcp_address found[SMP_TCP_ADDRESSES];
    char            texts[SMP_TCP_ADDRESSES][SMP_TCP_TEXT];
    const char     *interface = NULL;
    PyObject       *list;
    int             n;

    (void)module;
    if (arg != Py_None) {
        interface = PyUnicode_AsUTF8(arg);
        if (interface == NULL) {
            return NULL;
        }
    }
    n = smp_tcp_addresses(interface, found, texts);
    list = PyList_New(n);
    for (int i = 0; list != NULL && i < n; i++) {
        PyObject *text = PyUnicode_DecodeFSDefault(texts[i]);

        if (text == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, i, text);
        }
    }
    return list;
}

PyObject *
smp_python_peers(smp_comm *comm)
{
    PyObject *list = PyList_New(comm == NULL ? 0 : smp_comm_size(comm));

    if (list == NULL) {
        return NULL;
    }
    for (int rank = 0; rank < PyList_GET_SIZE(list); rank++) {
        uint64_t  messages, bytes;
        PyObject *peer;

        smp_comm_sent_to(comm, rank, &messages, &bytes);
        peer = Py_BuildValue("zKK", smp_comm_transport(comm, rank), messages, bytes);
        if (peer == NULL) {
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, rank, peer);
    }
    return list;
}

static PyObject *
someone_died(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(smp_comm_someone_died());
}

static PyMethodDef functions[] = {
    {"register_transport", register_transport, METH_O,
     "register_transport(capsule)\n--\n\n"
     "Sessions opened from now on may use this transport (``smp._mpi.transport``)."},
    {"load_ucx", load_ucx, METH_O,
     "load_ucx(path)\n--\n\n"
     "Loads libucp.so.0 and says its version; OSError says why it cannot be used.\n"
     "path: where a package has it, looked at last, or None."},
    {"addresses", addresses, METH_O,
     "addresses(interface)\n--\n\n"
     "This host's addresses that comm_interface may name; None: all of them."},
    {"someone_died", someone_died, METH_NOARGS,
     "someone_died()\n--\n\n"
     "Whether a rank died that this process was connected to, also in a job that it "
     "has left."},
    {NULL, NULL, 0, NULL},
};

/* transports: the names of those always registered */
static int
add_transports(PyObject *module)
{
    const smp_transport *transports[SMP_TRANSPORTS];
    int                  n = smp_transport_all(transports);
    PyObject            *names = PyTuple_New(n);
    int                  failed = names == NULL;

    for (int i = 0; i < n && !failed; i++) {
        PyObject *name = PyUnicode_FromString(transports[i]->name);

        failed = name == NULL;
        PyTuple_SET_ITEM(names, i, name);
    }
    failed = failed || PyModule_AddObjectRef(module, "transports", names) < 0;
    Py_XDECREF(names);
    return failed ? -1 : 0;
}

int
smp_python_add_comm(PyObject *module)
{
    return PyModule_AddFunctions(module, functions) < 0 || add_transports(module) < 0
               ? -1
               : 0;
}
